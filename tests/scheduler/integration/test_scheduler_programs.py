"""Programs (conversations of agents) over the scheduler's gRPC: the tools that answers call, the
programs' names, and metrics.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.rpc.channel import open_channel
from services.common.telemetry.metrics_servicer import collect_from
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import Gateway, Replica, gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt

FIRST, MORE = prompt(16), prompt(5, 700)


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with serving_replica(FakeWorker(num_blocks=64), policy="program") as replica:
        yield replica


@pytest.fixture
async def gateway(replica: Replica) -> AsyncIterator[Gateway]:
    async with gateway_of(replica) as gateway:
        yield gateway


async def values(replica: Replica, name: str, label: str = "") -> dict[str, float]:
    async with open_channel(replica.address) as channel:
        text = await collect_from(channel, exemplars=False)
    assert text is not None
    return {
        sample.labels.get(label, ""): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    }


async def turn(gateway: Gateway, handle: int, tokens: list[int], **fields: object) -> list[int]:
    """Runs a request. Returns its prompt and answer."""
    await gateway.add(handle, tokens, sampling=sampling(4), **fields)
    await gateway.finish(handle)
    return [*tokens, *gateway.heard[handle].tokens]


async def test_pauses_have_the_tools_of_the_answers(replica: Replica, gateway: Gateway) -> None:
    assert gateway.opened is not None
    assert gateway.opened.retains_contexts
    context = await turn(gateway, 1, FIRST)
    await gateway.say(end_turn=scheduler_pb2.EndTurn(handle=1, tool="grep"))
    assert await turn(gateway, 2, [*context, *MORE]) != context
    assert gateway.heard[2].num_cached_tokens == 16
    assert await values(replica, "stepwell_pause_seconds_count", "tool") == {"grep": 1}
    assert await values(replica, "stepwell_programs_begun_total", "source") == {"id": 0, "hash": 1}
    assert await values(replica, "stepwell_programs", "state") == {"in_turn": 0, "paused": 1}
    assert await values(replica, "stepwell_retained_blocks") == {"": 7}
    activity = await replica.stub.GetActivity(scheduler_pb2.GetActivityRequest())
    (paused,) = activity.programs
    assert (paused.program, paused.tool, paused.num_turns) == ("#1", "", 2)
    assert (paused.num_tokens, paused.num_blocks) == (29, 7)
    assert 0 < paused.paused_nanos < 60e9


async def test_a_program_with_two_turns_at_once_counts_once(
    replica: Replica, gateway: Gateway
) -> None:
    for handle in (1, 2):
        program = common_pb2.Program(id="job")
        await gateway.add(handle, FIRST, sampling=sampling(150), program=program)
    await gateway.until(lambda: all(gateway.heard[handle].tokens for handle in (1, 2)))
    assert await values(replica, "stepwell_programs", "state") == {"in_turn": 1, "paused": 0}


async def test_the_tool_of_an_answer_that_a_stop_string_ended(
    replica: Replica, gateway: Gateway
) -> None:
    """The scheduler receives the stop and the tool before it has ended the request."""
    await gateway.add(1, FIRST, sampling=sampling(150))
    await gateway.until(lambda: bool(gateway.heard[1].tokens))
    stopped = scheduler_pb2.AbortRequests(handles=[1], stopped_handles=[1])
    await gateway.say(abort=stopped)
    await gateway.say(end_turn=scheduler_pb2.EndTurn(handle=1, tool="sed"))
    await gateway.finish(1)
    context = [*FIRST, *continuation(FIRST, len(gateway.heard[1].tokens))]
    await turn(gateway, 2, [*context, *MORE])
    assert await values(replica, "stepwell_pause_seconds_count", "tool") == {"sed": 1}


async def test_unknown_handles_are_ignored_and_long_names_refused(gateway: Gateway) -> None:
    await gateway.say(end_turn=scheduler_pb2.EndTurn(handle=77, tool="grep"))
    await turn(gateway, 1, FIRST)
    await gateway.say(end_turn=scheduler_pb2.EndTurn(handle=1, tool="x" * 257))
    await gateway.until(lambda: gateway.error is not None)
    assert isinstance(gateway.error, InvalidArgument)


async def test_a_named_program_ends_with_its_last_turn(replica: Replica, gateway: Gateway) -> None:
    context = await turn(gateway, 1, FIRST, program=common_pb2.Program(id="job", tool="sed"))
    last = common_pb2.Program(id="job", ends=True)
    await turn(gateway, 2, [*context, *MORE], program=last)
    assert await values(replica, "stepwell_programs_begun_total", "source") == {"id": 1, "hash": 0}
    assert await values(replica, "stepwell_program_turns_sum") == {"": 2}
    assert await values(replica, "stepwell_programs", "state") == {"in_turn": 0, "paused": 0}
    assert await values(replica, "stepwell_retained_blocks") == {"": 0}


async def test_wrong_programs_are_refused_by_field(gateway: Gateway) -> None:
    await gateway.add(1, FIRST, program=common_pb2.Program(ends=True))
    await gateway.finish(1)
    rejected = gateway.heard[1].rejected
    assert rejected is not None
    assert rejected.field == "program.ends"


async def test_a_setting_that_the_policy_does_not_use_ends_the_start() -> None:
    with pytest.raises(FailedPrecondition, match="--aging-interval has no effect with policy fcfs"):
        async with serving_replica(FakeWorker(), aging_interval=4):
            pass


async def test_the_settings_of_programs_reach_the_policy() -> None:
    async with (
        serving_replica(FakeWorker(num_blocks=64), policy="program", max_num_programs=1) as replica,
        gateway_of(replica) as gateway,
    ):
        for handle in (1, 2, 3):
            await turn(gateway, handle, prompt(16, 100 * handle))
        assert (await values(replica, "stepwell_programs", "state"))["paused"] == 1


async def test_contexts_that_others_took_are_counted() -> None:
    async with (
        serving_replica(FakeWorker(num_blocks=12), policy="program") as replica,
        gateway_of(replica) as gateway,
    ):
        context = await turn(gateway, 1, FIRST)
        await turn(gateway, 2, prompt(30, 300))
        await turn(gateway, 3, [*context, *MORE])
        num_cached = gateway.heard[3].num_cached_tokens
        assert num_cached is not None
        assert num_cached < 16
        taken = await values(replica, "stepwell_retained_blocks_taken_total", "state")
        assert taken["paused"] > 0
        recomputed = await values(replica, "stepwell_recomputed_tokens_total", "cause")
        assert recomputed == {"evicted": 20 // 4 * 4 - num_cached, "preempted": 0, "lost": 0}


async def test_pins_are_counted_as_contexts() -> None:
    async with (
        serving_replica(FakeWorker(num_blocks=64), policy="continuum-fixed") as replica,
        gateway_of(replica) as gateway,
    ):
        job = common_pb2.Program(id="job", tool="sed")
        context = await turn(gateway, 1, FIRST, program=job)
        assert await values(replica, "stepwell_programs", "state") == {"in_turn": 0, "paused": 1}
        assert await values(replica, "stepwell_retained_blocks") == {"": 4}
        activity = await replica.stub.GetActivity(scheduler_pb2.GetActivityRequest())
        (paused,) = activity.programs
        assert (paused.program, paused.tool, paused.num_blocks) == ("job", "sed", 4)
        await turn(gateway, 2, [*context, *MORE], program=common_pb2.Program(id="job", ends=True))
        assert await values(replica, "stepwell_programs", "state") == {"in_turn": 0, "paused": 0}
        assert await values(replica, "stepwell_retained_blocks") == {"": 0}
        assert await values(replica, "stepwell_program_turns_sum") == {"": 2}
        assert await values(replica, "stepwell_pause_seconds_count", "tool") == {"sed": 1}


async def test_a_scheduler_without_contexts_has_no_metrics_of_them() -> None:
    async with serving_replica() as replica, gateway_of(replica) as gateway:
        assert gateway.opened is not None
        assert not gateway.opened.retains_contexts
        await turn(gateway, 1, FIRST, program=common_pb2.Program(id="job"))
        await asyncio.sleep(0)
        assert not await values(replica, "stepwell_programs", "state")
