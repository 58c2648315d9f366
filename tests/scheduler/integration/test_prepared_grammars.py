"""Workers are asked once to compile a grammar. They are asked again if they may have dropped it."""

from collections.abc import AsyncIterator

import pytest
from stepwell.common.v1 import common_pb2

from services.common.errors import InvalidArgument
from services.common.request.structured_outputs import (
    KEPT_GRAMMARS,
    StructuredOutputs,
    StructuredOutputsKind,
)
from services.common.rpc.channel import open_channel
from services.scheduler.adapters.workers.worker_client import Rank, WorkerGroup
from tests.scheduler.fake_worker import FakeWorker

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
