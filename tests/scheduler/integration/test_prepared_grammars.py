"""The scheduler asks workers to compile each grammar once, and again if they may have dropped it. A
worker that hangs in a compilation counts as lost.
"""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from stepwell.common.v1 import common_pb2

from services.common.errors import InvalidArgument, Unavailable
from services.common.request.structured_outputs import (
    KEPT_GRAMMARS,
    StructuredOutputs,
    StructuredOutputsKind,
)
from services.common.rpc.channel import open_channel
from services.scheduler.adapters.workers import worker_client
from services.scheduler.adapters.workers.worker_client import Rank, WorkerGroup
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import gateway_of, sampling, serving_replica
from tests.tiny_models import save_tiny_model
from tests.worker.worker_process import start as start_worker
from tests.worker.worker_process import until_serving

NUM_KNOWN = KEPT_GRAMMARS // 2


def of_text(text: str) -> StructuredOutputs:
    return StructuredOutputs(StructuredOutputsKind.REGEX, text)


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    found = [FakeWorker(rank=rank, world_size=2) for rank in range(2)]
    yield found
    for worker in found:
        await worker.stop()


@pytest.fixture
async def group(workers: list[FakeWorker]) -> AsyncIterator[WorkerGroup]:
    channels = {address: open_channel(address) for address in [await x.start() for x in workers]}
    ranks = [Rank(address, channel) for address, channel in channels.items()]
    group = WorkerGroup(ranks, 60.0, common_pb2.Owner())
    await group.describe()
    yield group
    for channel in channels.values():
        await channel.close()


async def test_what_every_rank_has_compiled_is_known(
    group: WorkerGroup, workers: list[FakeWorker]
) -> None:
    assert not group.has_grammar(of_text("a"))
    await group.prepare_grammar(of_text("a"))
    assert [worker.prepared for worker in workers] == [["a"], ["a"]]
    await group.describe()
    assert group.has_grammar(of_text("a"))
    assert not group.has_grammar(of_text("b"))


async def test_a_new_worker_has_none(group: WorkerGroup, workers: list[FakeWorker]) -> None:
    await group.prepare_grammar(of_text("a"))
    workers[1].description.incarnation = "another process"
    await group.describe()
    assert not group.has_grammar(of_text("a"))


async def test_a_refused_one_is_not_known(group: WorkerGroup) -> None:
    with pytest.raises(InvalidArgument, match="unclosed group"):
        await group.prepare_grammar(of_text("("))
    assert not group.has_grammar(of_text("("))


async def test_the_one_that_came_longest_ago_is_forgotten_before_a_worker_forgets_it(
    group: WorkerGroup,
) -> None:
    texts = [str(number) for number in range(NUM_KNOWN)]
    for text in texts:
        await group.prepare_grammar(of_text(text))
    assert group.has_grammar(of_text("0"))
    await group.prepare_grammar(of_text("one more"))
    assert [text for text in texts if not group.has_grammar(of_text(text))] == ["1"]


async def test_a_worker_that_hangs_while_it_compiles_is_lost_before_the_call_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_client, "IDLE_CHECK_SECONDS", 60.0)
    monkeypatch.setattr(worker_client, "PREPARING_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(worker_client, "DESCRIBE_TIMEOUT_SECONDS", 0.3)
    lost: asyncio.Queue[str] = asyncio.Queue()
    with tempfile.TemporaryDirectory(prefix="sw") as directory:
        save_tiny_model(Path(directory), "llama")
        address = f"unix:{directory}/worker.sock"
        process = await start_worker("--model", directory, "--address", address)
        await until_serving(address)
        async with open_channel(address) as channel:
            rank = Rank(address, channel)
            rank.on_lost = lost.put_nowait
            rank.open()
            process.send_signal(signal.SIGSTOP)
            compiling = asyncio.create_task(rank.prepare_grammar(of_text("a+")))
            async with asyncio.timeout(8):
                assert "does not answer" in await lost.get()
            assert not compiling.done()
            process.kill()
            await process.communicate()
            with pytest.raises(Unavailable):
                await compiling


async def test_a_worker_that_compiles_for_long_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "PREPARING_CHECK_SECONDS", 0.05)
    worker, num_probes = FakeWorker(), 0

    def described() -> None:
        nonlocal num_probes
        num_probes += 1

    regex = {"kind": common_pb2.STRUCTURED_OUTPUTS_KIND_REGEX, "text": "a+"}
    worker.compiles.clear()
    async with serving_replica(worker) as replica, gateway_of(replica) as gateway:
        worker.described = described
        await gateway.add(1, range(20, 40), sampling=sampling(structured_outputs=regex))
        await replica.until(lambda _: num_probes > 5)
        worker.compiles.set()
        await gateway.finish(1)
        assert len({step.generation for step in worker.steps}) == 1
