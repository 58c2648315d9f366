"""The gateway's session (stream) with a scheduler: batched messages, lost connections, and by how
many steps a busy gateway may lag.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import InternalError
from services.common.replica.queue_state import QueueState
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.schedulers.scheduler_link import SchedulerLink, longest_backoff
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.request.delivery import received
from services.gateway.core.request.inflight import Mailbox
from services.gateway.core.request.request import EngineRequest
from tests.gateway.fake_fleet import ManualClock
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving as serving_gateway
from tests.scheduler.cuttable_proxy import CuttableProxy

SECONDS = 60
NUM_RUNNING = 32
FIRST_HANDLE = 1000
FEW_STEPS = 8


def admitted(index: int) -> scheduler_pb2.Admitted:
    return scheduler_pb2.Admitted(handle=FIRST_HANDLE + index)


class SteadyScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Runs steps of NUM_RUNNING requests as fast as the gateway reads them. It runs in a thread, so
    that it continues while the event loop of the test is blocked.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.is_far_ahead = threading.Event()

    def Session(  # noqa: N802 - the contract's name
        self,
        request_iterator: Iterator[scheduler_pb2.SessionRequest],  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> Iterator[scheduler_pb2.SessionResponse]:
        queue = scheduler_pb2.QueueState(max_num_waiting=1)
        yield scheduler_pb2.SessionResponse(number=1, opened=FakeScheduler().opened())
        yield scheduler_pb2.SessionResponse(number=2, queue=queue)
        while True:
            step = scheduler_pb2.StepDeltas(
                step=self.num_steps,
                admitted=[] if self.num_steps else map(admitted, range(NUM_RUNNING)),
                handles=range(FIRST_HANDLE, FIRST_HANDLE + NUM_RUNNING),
                num_tokens=[1] * NUM_RUNNING,
                num_output_tokens=[self.num_steps + 1] * NUM_RUNNING,
                token_ids=range(NUM_RUNNING),
            )
            yield scheduler_pb2.SessionResponse(number=self.num_steps + 3, deltas=step)
            self.num_steps += 1
            if self.num_steps > FEW_STEPS:
                self.is_far_ahead.set()


class BusyReplica(Replica):
    """Blocks the event loop whenever the queue's state arrives, like other work in a gateway."""

    def __init__(self, address: str, link: SchedulerLink, scheduler: SteadyScheduler) -> None:
        super().__init__(address, link, ManualClock(), self)  # type: ignore[arg-type]
        self._scheduler = scheduler
        self.looked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def opened(self, description: ReplicaDescription) -> None:  # noqa: ARG002
        sampling = SamplingParams(max_tokens=1_000_000)
        request = EngineRequest("r", [1], sampling, 0, "", 0)
        mailbox = Mailbox([request] * NUM_RUNNING, count(), lambda _: None, lambda: 0)
        for inflight in mailbox.inflights:
            handle = FIRST_HANDLE + inflight.index
            self.running[handle] = inflight
            self._link.add(handle, inflight)

    def admitted(self, handle: int, num_cached_tokens: int) -> None: ...

    def queue_changed(self, queue: QueueState) -> None:  # noqa: ARG002
        self.looked.set_result(self._scheduler.is_far_ahead.wait(timeout=1))

    def closed(self, reason: str) -> None: ...


class WatchedReplica(Replica):
    def __init__(self, address: str, link: SchedulerLink) -> None:
        super().__init__(address, link, ManualClock(), self)  # type: ignore[arg-type]
        self.has_opened = asyncio.Event()
        self.has_closed = asyncio.Event()
        self.reasons: list[str] = []

    def opened(self, description: ReplicaDescription) -> None:  # noqa: ARG002
        self.has_opened.set()

    def state_changed(self, state: ReplicaState) -> None: ...

    def closed(self, reason: str) -> None:
        self.reasons.append(reason)
        self.has_closed.set()


@contextmanager
def serving(scheduler: SteadyScheduler, address: str) -> Iterator[None]:
    server = grpc.server(ThreadPoolExecutor(2))
    register: Any = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    register(scheduler, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


async def test_a_gateway_that_is_busy_is_a_few_steps_behind_and_then_reads_on(
    tmp_path: Path,
) -> None:
    scheduler, address = SteadyScheduler(), f"unix:{tmp_path}/s"
    with serving(scheduler, address):
        link = SchedulerLink(address, "gateway", SECONDS)
        replica = BusyReplica(address, link, scheduler)
        session = asyncio.create_task(link.run(replica))
        try:
            async with asyncio.timeout(SECONDS):
                assert not await replica.looked, "the transport holds steps that nothing has read"
                await asyncio.to_thread(scheduler.is_far_ahead.wait)
        finally:
            session.cancel()
            await asyncio.wait({session})


async def test_after_two_sessions_without_an_answer_the_next_has_another_connection() -> None:
    """The proxy drops all data, but does not close the connection. Only a new one helps."""
    scheduler = FakeScheduler(heartbeat_seconds=0.02)
    async with scheduler.running() as target:
        proxy = CuttableProxy(target)
        link = SchedulerLink(await proxy.start(), "gateway", 0.2)
        replica = WatchedReplica("s", link)
        session = asyncio.create_task(link.run(replica))
        try:
            async with asyncio.timeout(SECONDS):
                await replica.has_opened.wait()
                replica.has_opened.clear()
                proxy.lose_all()
                await replica.has_opened.wait()
        finally:
            session.cancel()
            await asyncio.wait({session})
            await proxy.close()
        assert proxy.num_connections == 2
        assert replica.reasons[:2] == ["the scheduler sent no message within 0.2 s and hangs"] * 2


async def test_a_scheduler_that_answers_in_another_protocol_opens_no_session() -> None:
    """The gateway compares the protocol numbers, because an old scheduler may not compare them."""

    class OtherScheduler(FakeScheduler):
        def opened(self) -> scheduler_pb2.SessionOpened:
            opened = super().opened()
            opened.release.CopyFrom(common_pb2.Release(protocol=99, version="9.0"))
            return opened

    async with OtherScheduler().running() as target:
        link = SchedulerLink(target, "gateway", SECONDS)
        replica = WatchedReplica("s", link)
        session = asyncio.create_task(link.run(replica))
        try:
            async with asyncio.timeout(SECONDS):
                await replica.has_closed.wait()
        finally:
            session.cancel()
            await asyncio.wait({session})
        assert not replica.has_opened.is_set()
        assert "the scheduler version 9.0 (protocol 99)" in replica.reasons[0]


@pytest.mark.parametrize(
    ("away_seconds", "longest"), [(0, 0.5), (5, 0.5), (20, 2), (50, 5), (9000, 5)]
)
def test_a_scheduler_that_is_away_for_long_is_tried_less_often(
    away_seconds: float, longest: float
) -> None:
    assert longest_backoff(away_seconds) == longest


async def test_sequences_of_one_moment_go_in_one_message(model: Path) -> None:
    """All sequences that are added while one message is sent are in the next message."""
    scheduler = FakeScheduler()
    async with serving_gateway(model, scheduler) as served:
        body = {"prompt": [10, 11], "max_tokens": 1, "n": 8, "seed": 1}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 8
    assert scheduler.added_together == [8]
    assert [add.handle for add in scheduler.adds] == list(range(1, 9))


async def test_a_sequence_that_cannot_be_encoded_fails_alone(model: Path) -> None:
    async with serving_gateway(model) as served:
        sampling = SamplingParams(seed=1, max_tokens=-1)
        mailbox = served.gateway.fleet.start([EngineRequest("r", [5], sampling, 0, "", 1)])
        async with asyncio.timeout(SECONDS):
            [(_, delta)] = await received(mailbox)
        assert isinstance(delta.error, InternalError)
        body = {"prompt": [10, 11], "max_tokens": 1}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200


async def test_long_sequences_go_in_several_messages(model: Path) -> None:
    scheduler = FakeScheduler()
    async with serving_gateway(model, scheduler) as served:
        body = {"prompt": [10] * 400, "max_tokens": 1, "n": 64}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 200
    assert len(scheduler.adds) == 64
    assert sum(scheduler.added_together) >= 63, "the last one may be alone"
    assert max(scheduler.added_together) * 4 * 400 <= 64 * 1024
