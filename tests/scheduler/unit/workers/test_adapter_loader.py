"""The loader of LoRA adapters: which ones the workers load, and how long requests wait for them."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from services.common.errors import FailedPrecondition, InvalidArgument, StepwellError, Unavailable
from services.common.pool.ids import RequestKey
from services.common.request.adapter import Adapter
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.workers.adapter_loader import AdapterLoader
from services.scheduler.core.request import Request, RequestStatus

A, B, C = (Adapter(bytes([number]) * 32, f"adapter-{number}", "/a") for number in range(3))


class Workers:
    """Workers that load adapters, or fail if the test sets `failures`. A call arrives after
    `turns_there` iterations of the event loop, and its answer after `turns_back` more.
    """

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.failures: list[StepwellError] = []
        self.turns_there, self.turns_back = 1, 0

    async def load_adapter(self, adapter: Adapter, kept: Sequence[bytes]) -> None:
        await turns(self.turns_there)
        if self.failures:
            raise self.failures.pop(0)
        self.held = self.held & {*kept} | {adapter.digest}
        await turns(self.turns_back)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Replica:
    """An `AdapterLoader` with two slots, its workers, and requests that have not ended."""

    def __init__(self) -> None:
        self.workers = Workers()
        self.unfinished: list[Request] = []
        self.failed: list[tuple[Request, str]] = []
        self.loader = AdapterLoader(
            self.workers, 2, lambda: self.unfinished, lambda *failure: self.failed.append(failure)
        )

    def request(self, adapter: Adapter) -> Request:
        key = RequestKey(len(self.unfinished))
        request = Request(str(key), key, [1], 1, SamplingParams(), adapter_digest=adapter.digest)
        request.awaits_adapter = not self.loader.is_loaded(adapter.digest)
        self.unfinished.append(request)
        return request

    async def admit(self, adapter: Adapter) -> Request:
        request = self.request(adapter)
        assert await self.loader.load_for(request, adapter) == ""
        assert not request.awaits_adapter
        return request

    def end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self.unfinished.remove(request)


async def test_the_one_asked_for_longest_ago_makes_room() -> None:
    replica = Replica()
    for adapter in (A, B):
        replica.end(await replica.admit(adapter))
    assert replica.loader.is_loaded(A.digest)
    await replica.admit(C)
    assert replica.workers.held == {A.digest, C.digest}
    assert not replica.loader.is_loaded(B.digest)


async def test_an_adapter_waits_for_a_place_while_requests_have_all() -> None:
    replica = Replica()
    first, _ = await replica.admit(A), await replica.admit(B)
    waiting = replica.request(C)
    loading = asyncio.create_task(replica.loader.load_for(waiting, C))
    await asyncio.sleep(0.15)
    assert not loading.done()
    assert replica.workers.held == {A.digest, B.digest}
    replica.end(first)
    assert await asyncio.wait_for(loading, 5) == ""
    assert replica.workers.held == {B.digest, C.digest}


async def test_many_requests_for_more_adapters_than_places_all_get_theirs() -> None:
    replica = Replica()
    requests = [(replica.request(adapter), adapter) for adapter in (A, B, C) * 3]

    async def serve(request: Request, adapter: Adapter) -> None:
        assert await replica.loader.load_for(request, adapter) == ""
        assert adapter.digest in replica.workers.held
        replica.end(request)

    await asyncio.wait_for(asyncio.gather(*(serve(*one) for one in requests)), 5)
    assert replica.unfinished == []


async def test_a_request_that_ended_loads_nothing() -> None:
    replica = Replica()
    await replica.admit(A)
    await replica.admit(B)
    waiting = replica.request(C)
    loading = asyncio.create_task(replica.loader.load_for(waiting, C))
    await asyncio.sleep(0.01)
    replica.end(waiting)
    assert await asyncio.wait_for(loading, 5) == ""
    assert replica.workers.held == {A.digest, B.digest}


async def test_workers_that_are_away_are_asked_again() -> None:
    replica = Replica()
    replica.workers.failures = [Unavailable("away"), Unavailable("away")]
    await replica.admit(A)
    assert replica.workers.held == {A.digest}


@pytest.mark.parametrize("refusal", [InvalidArgument("no LoRA"), FailedPrecondition("changed")])
async def test_an_adapter_that_cannot_be_served_is_refused(refusal: StepwellError) -> None:
    replica = Replica()
    replica.workers.failures = [refusal]
    request = replica.request(A)
    error = await replica.loader.load_for(request, A)
    assert error == f"the adapter 'adapter-0' cannot be loaded: {refusal.message}"
    assert not replica.loader.is_loaded(A.digest)


async def test_new_workers_get_what_the_old_ones_held() -> None:
    replica = Replica()
    await replica.admit(A)
    await replica.admit(B)
    replica.workers.held.clear()
    await replica.loader.reload()
    assert replica.workers.held == {A.digest, B.digest}
    assert replica.failed == []


@pytest.mark.parametrize(("there", "back"), [(1, 0), (1, 3), (3, 1)])
async def test_new_workers_hold_an_adapter_that_is_loaded_meanwhile(there: int, back: int) -> None:
    """New workers load the adapters that the old ones had. Before, during or after these calls, the
    call that loads adapter C arrives, at the old or the new workers.
    """

    async def lose(replica: Replica, after: int) -> None:
        await turns(after)
        replica.workers.held.clear()
        await replica.loader.reload()

    async def ask(replica: Replica, after: int) -> None:
        await turns(after)
        await replica.admit(C)

    for lost_after, asked_after in itertools.product(range(8), range(12)):
        replica = Replica()
        replica.end(await replica.admit(A))
        await replica.admit(B)
        replica.workers.turns_there, replica.workers.turns_back = there, back
        await asyncio.gather(lose(replica, lost_after), ask(replica, asked_after))
        assert replica.loader.is_loaded(C.digest)
        assert replica.workers.held >= {B.digest, C.digest}, (lost_after, asked_after)


async def test_requests_end_whose_adapter_new_workers_cannot_load() -> None:
    replica = Replica()
    first, second = await replica.admit(A), await replica.admit(B)
    replica.workers.held.clear()
    replica.workers.failures = [FailedPrecondition("its files changed")]
    await replica.loader.reload()
    assert replica.failed == [(first, "its files changed")]
    assert replica.workers.held == {B.digest}
    assert replica.loader.is_loaded(second.adapter_digest)


async def test_a_replica_without_places_refuses_an_operators_load() -> None:
    loader = AdapterLoader(Workers(), 0, lambda: (), lambda *_: None)
    with pytest.raises(InvalidArgument, match="--enable-lora"):
        await loader.load(A)
