"""The engine, the scheduler's loop that plans and sends steps: it adds requests and delivers
tokens, in spite of pauses, aborts, and losses of the pool or the workers.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.common.errors import Aborted, FailedPrecondition, Unavailable
from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.scheduler.core.engine.engine_core import EngineState
from services.scheduler.core.engine.fault_search import MAX_FAILURES_ALONE
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.ports import WorkersLost
from services.scheduler.core.request import RequestStatus
from tests.cli.virtual_time import run
from tests.scheduler.engine_bench import Bench, eventually, running
from tests.scheduler.fakes import SECONDS
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import prompt


@pytest.fixture(
    params=[{}, {"async_scheduling": True}, {"pipeline_parallel_size": 2}],
    ids=["one step in flight", "two steps in flight", "two pipeline stages"],
)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with running(Bench(**request.param)) as bench:
        yield bench


async def test_requests_go_in_and_tokens_come_out(bench: Bench) -> None:
    bench.add("a", prompt(9))
    bench.add("b", prompt(5, 500), max_tokens=3)
    await bench.until_ended("a", "b")
    assert bench.inbox.tokens == {
        "a": continuation(prompt(9), 8),
        "b": continuation(prompt(5, 500), 3),
    }
    assert bench.inbox.ended == ["b", "a"]
    await bench.until_idle()


async def test_an_idle_engine_takes_no_steps_and_wakes_up_again(bench: Bench) -> None:
    bench.add("a", prompt(5), max_tokens=2)
    await bench.until_ended("a")
    await bench.until_idle()
    steps = bench.executor.num_steps
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.executor.num_steps == steps
    bench.add("b", prompt(5), max_tokens=2)
    await bench.until_ended("b")


async def test_requests_one_after_another_take_no_step_that_only_gives_back() -> None:
    async with running(Bench(linger_seconds=SECONDS)) as bench:
        for number, name in enumerate("abc", start=1):
            bench.add(name, prompt(5, 100 * number), max_tokens=2)
            await bench.until_ended(name)
            assert bench.executor.num_steps == 2 * number, "one for each token"
        assert bench.executor.num_requests == 1, "the workers still have the last one"
        await bench.engine.pause(PauseMode.KEEP)
        assert bench.pool.num_free_blocks == 49, "a pause gives back all blocks at once"


def test_an_idle_engine_frees_in_time_what_a_policy_held() -> None:
    async def two_requests() -> None:
        async with running(Bench(policy="continuum-fixed")) as bench:
            for name, first in (("a", 100), ("b", 500)):
                program = DeclaredProgram(name, tool="sed")
                bench.add(name, prompt(9, first), max_tokens=2, program=program)
                await bench.until_ended(name)
                await asyncio.sleep(1.5)
            assert bench.pool.num_free_blocks == 49 - 3, "the first is free"
            await asyncio.sleep(1.2)
            await bench.until_idle()

    run(two_requests())


async def test_a_pause_frees_what_a_policy_holds() -> None:
    async with running(Bench(policy="continuum-fixed")) as bench:
        bench.add("a", prompt(9), max_tokens=2)
        await bench.until_ended("a")
        assert bench.pool.num_free_blocks == 49 - 3
        await bench.engine.pause(PauseMode.KEEP)
        assert bench.pool.num_free_blocks == 49


async def test_a_request_that_comes_during_a_step_runs_in_a_later_one(bench: Bench) -> None:
    bench.executor.hold()
    bench.add("a", prompt(5))
    await eventually(lambda: bench.executor.num_in_flight > 0)
    bench.add("b", prompt(5, 500))
    assert bench.engine.num_waiting >= 1
    bench.executor.let_go()
    await bench.until_ended("a", "b")
    assert bench.inbox.tokens["b"] == continuation(prompt(5, 500), 8)


async def test_a_request_that_comes_while_a_stage_is_free_runs_at_once() -> None:
    async with running(Bench(pipeline_parallel_size=2)) as bench:
        bench.executor.hold()
        bench.add("a", prompt(5))
        await eventually(lambda: bench.executor.num_in_flight == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        bench.add("b", prompt(5, 500))
        await eventually(lambda: bench.executor.num_in_flight == 2)
        bench.add("c", prompt(5, 900))
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.executor.num_in_flight == 2
        bench.executor.let_go()
        await bench.until_ended("a", "b", "c")
        for name, first in (("a", 100), ("b", 500), ("c", 900)):
            assert bench.inbox.tokens[name] == continuation(prompt(5, first), 8)
        await bench.until_idle()


async def test_an_abort_during_a_step_ends_the_request_with_what_it_has(bench: Bench) -> None:
    request = bench.add("a", prompt(5), max_tokens=100)
    other = bench.add("b", prompt(5, 500), max_tokens=20)
    await bench.until_tokens("a", 3)
    bench.executor.hold()
    await eventually(lambda: bench.executor.num_in_flight > 0)
    bench.engine.changes.abort([request])
    bench.executor.let_go()
    await bench.until_ended("a", "b")
    assert request.finish_reason is FinishReason.ABORT
    assert bench.inbox.tokens["a"] == continuation(prompt(5), len(bench.inbox.tokens["a"]))
    assert other.token_ids[5:] == continuation(prompt(5, 500), 20)
    assert bench.watcher.num_ended == 1
    await bench.until_idle()


async def test_aborting_what_has_not_been_taken_in_yet_ends_it(bench: Bench) -> None:
    request = bench.add("a", prompt(5))
    bench.engine.changes.abort([request, request])
    await bench.until_ended("a")
    assert bench.inbox.tokens["a"] == []
    await bench.until_idle()
    bench.engine.changes.abort([request])
    await bench.until_idle()


async def test_an_abort_counts_although_the_wait_in_the_queue_ends_as_well(bench: Bench) -> None:
    request = bench.add("a", prompt(9), max_tokens=50)
    await eventually(lambda: request in bench.engine.scheduler.queues.waiting)
    bench.engine.changes.abort([request])
    bench.engine.changes.abort([request], FinishReason.QUEUE_TIMEOUT)
    await bench.until_ended("a")
    assert request.finish_reason is FinishReason.ABORT
    await bench.until_idle()


async def test_pause_returns_when_no_step_is_in_flight_and_keeps_everything(bench: Bench) -> None:
    bench.add("a", prompt(5), max_tokens=50)
    await bench.until_tokens("a", 2)
    bench.executor.hold()
    await eventually(lambda: bench.executor.num_in_flight > 0)
    pausing = asyncio.create_task(bench.engine.pause(PauseMode.KEEP))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not pausing.done()
    bench.executor.let_go()
    await pausing
    assert (bench.engine.state, bench.executor.num_in_flight) == (EngineState.PAUSED, 0)
    steps, known = bench.executor.num_steps, len(bench.inbox.tokens["a"])
    bench.add("b", prompt(5, 500))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (bench.executor.num_steps, len(bench.inbox.tokens["a"])) == (steps, known)
    await bench.engine.resume()
    await bench.until_ended("a", "b")
    assert bench.inbox.tokens["a"] == continuation(prompt(5), 50)
    await bench.until_idle()


@pytest.mark.parametrize("operation", ["pause", "reset"])
async def test_a_cancelled_pause_costs_no_token(bench: Bench, operation: str) -> None:
    bench.add("a", prompt(5), max_tokens=50)
    await bench.until_tokens("a", 2)
    bench.executor.hold()
    await eventually(lambda: bench.executor.num_in_flight > 0)
    asking = asyncio.create_task(
        bench.engine.pause(PauseMode.KEEP)
        if operation == "pause"
        else bench.engine.reset_prefix_cache(preempt_running=True)
    )
    for _ in range(10):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    bench.executor.let_go()
    await bench.engine.resume()
    await bench.until_ended("a")
    assert bench.inbox.tokens["a"] == continuation(prompt(5), 50)


@pytest.mark.parametrize("operation", ["pause", "reset"])
async def test_a_call_that_is_cancelled_during_its_transaction_loses_no_block(
    bench: Bench, operation: str
) -> None:
    for num_turns in range(24):
        bench.add(f"request {num_turns}", prompt(9), max_tokens=100)
        await bench.until_tokens(f"request {num_turns}", 2)
        calling = asyncio.create_task(
            bench.engine.pause(PauseMode.ABORT)
            if operation == "pause"
            else bench.engine.reset_prefix_cache(preempt_running=True)
        )
        for _ in range(num_turns):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait({calling})
        await bench.engine.resume()
        bench.engine.changes.abort(bench.engine.unfinished)
        await bench.until_idle()
    assert bench.replica.num_reopened == 0


async def test_an_engine_whose_call_was_cancelled_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task group would ignore a CancelledError, and the process would serve without an engine."""

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    bench = Bench()
    monkeypatch.setattr(bench.pool, "transact", cancelled)
    bench.add("a", prompt(5))
    with pytest.raises(RuntimeError, match="was cancelled"):
        async with asyncio.timeout(SECONDS):
            await bench.engine.run()


async def test_workers_lost_while_a_standstill_is_awaited(bench: Bench) -> None:
    bench.add("a", prompt(5), max_tokens=50)
    await bench.until_tokens("a", 2)
    bench.executor.hold()
    await eventually(lambda: bench.executor.num_in_flight > 0)
    bench.replica.there.clear()
    pausing = asyncio.create_task(bench.engine.pause(PauseMode.KEEP))
    for _ in range(10):
        await asyncio.sleep(0)
    bench.executor.lose()
    await pausing
    with pytest.raises(Unavailable):
        await bench.engine.reset_prefix_cache(preempt_running=True)
    bench.replica.there.set()
    await bench.engine.resume()
    await bench.until_ended("a")
    assert bench.inbox.tokens["a"] == continuation(prompt(5), 50)
    await bench.until_idle()


async def test_pause_with_abort_ends_everything(bench: Bench) -> None:
    for number in range(6):
        bench.add(f"r{number}", prompt(5, 100 * number), max_tokens=100)
    await bench.until_tokens("r0", 2)
    await bench.engine.pause(PauseMode.ABORT)
    assert sorted(bench.inbox.ended) == [f"r{number}" for number in range(6)]
    assert bench.pool.num_free_blocks == 49
    assert bench.engine.state is EngineState.PAUSED
    await bench.engine.resume()
    await bench.until_idle()


async def test_a_pool_that_is_lost_in_a_pause_is_found_again_when_it_is_over(bench: Bench) -> None:
    request = bench.add("a", prompt(5), max_tokens=30)
    bench.add("b", prompt(5, 500), max_tokens=30)
    await bench.until_tokens("b", 2)
    await bench.engine.pause(PauseMode.KEEP)
    bench.pool.lose()
    bench.engine.changes.abort([request])
    await eventually(lambda: bench.replica.num_reopened == 1)
    await eventually(lambda: bench.engine.state is EngineState.PAUSED)
    await bench.engine.resume()
    await bench.until_ended("b")
    assert bench.inbox.tokens["b"] == continuation(prompt(5, 500), 30)
    await bench.until_idle()


async def test_pausing_and_resuming_twice_is_the_same_as_once(bench: Bench) -> None:
    bench.add("a", prompt(5), max_tokens=30)
    await bench.engine.pause(PauseMode.KEEP)
    await bench.engine.pause(PauseMode.KEEP)
    await bench.engine.resume()
    await bench.engine.resume()
    await bench.until_ended("a")
    assert bench.inbox.tokens["a"] == continuation(prompt(5), 30)


async def test_a_pause_ends_between_two_turns(bench: Bench) -> None:
    bench.executor.hold()
    bench.add("a", prompt(5), max_tokens=30)
    await eventually(lambda: bench.executor.num_in_flight > 0)
    pausing = asyncio.create_task(bench.engine.pause(PauseMode.WAIT))
    resuming = asyncio.create_task(bench.engine.resume())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not resuming.done(), "the turn has yet to take in the tokens of its step"
    bench.executor.let_go()
    await resuming
    with pytest.raises(Aborted, match="resumed while requests ran"):
        await pausing
    await bench.until_ended("a")


async def test_an_abort_while_paused_ends_the_request(bench: Bench) -> None:
    request = bench.add("a", prompt(5), max_tokens=100)
    await bench.until_tokens("a", 1)
    await bench.engine.pause(PauseMode.KEEP)
    bench.engine.changes.abort([request])
    await bench.until_ended("a")
    await eventually(lambda: bench.pool.num_free_blocks == 49)
    assert bench.engine.state is EngineState.PAUSED
    await bench.engine.resume()
    await bench.until_idle()


async def test_lost_workers_cost_computation_and_no_token(bench: Bench) -> None:
    bench.add("a", prompt(9), max_tokens=20)
    bench.add("b", prompt(9), max_tokens=30)
    await bench.until_tokens("b", 4)
    bench.executor.hold()
    await eventually(lambda: bench.executor.num_in_flight > 0)
    bench.executor.lose()
    await bench.until_ended("a", "b")
    assert bench.inbox.tokens["a"] == continuation(prompt(9), 20)
    assert bench.inbox.tokens["b"] == continuation(prompt(9), 30)
    assert (bench.replica.num_reopened, bench.watcher.num_lost) == (1, 1)
    assert set(bench.watcher.preempted_ids) == {"a", "b"}
    await bench.until_idle()


async def test_a_lost_pool_costs_computation_and_no_token(bench: Bench) -> None:
    bench.add("a", prompt(9), max_tokens=20)
    await bench.until_tokens("a", 4)
    bench.pool.lose()
    bench.add("b", prompt(9), max_tokens=20)
    await bench.until_ended("a", "b")
    assert bench.inbox.tokens["a"] == bench.inbox.tokens["b"] == continuation(prompt(9), 20)
    assert bench.replica.num_reopened == 1
    await bench.until_idle()


async def test_while_a_part_is_away_requests_wait_and_can_be_aborted(bench: Bench) -> None:
    first = bench.add("a", prompt(9), max_tokens=20)
    await bench.until_tokens("a", 2)
    bench.replica.there.clear()
    bench.executor.lose()
    await eventually(lambda: bench.engine.state is EngineState.RECOVERING)
    assert bench.engine.state_reason == "the workers are away"
    assert bench.readiness.lacks == ["the workers are away"]
    bench.add("b", prompt(5), max_tokens=3)
    assert bench.engine.num_waiting == 2
    bench.engine.changes.abort([first])
    bench.replica.there.set()
    await bench.until_ended("a", "b")
    assert first.finish_reason is FinishReason.ABORT
    assert bench.inbox.tokens["b"] == continuation(prompt(5), 3)
    await bench.until_idle()
    assert bench.engine.state_reason == ""


async def test_no_request_is_blamed_for_workers_that_their_supervisor_ended(bench: Bench) -> None:
    bench.replica.workers_were_ended = True
    bench.executor.poison = frozenset(prompt(9))
    request = bench.add("a", prompt(9), max_tokens=5)
    await eventually(lambda: bench.replica.num_reopened > MAX_FAILURES_ALONE + 1)
    bench.executor.poison = frozenset()
    await bench.until_ended("a")
    assert request.finish_reason is FinishReason.LENGTH
    assert bench.inbox.tokens["a"] == continuation(prompt(9), 5)


async def test_parts_that_keep_going_away_only_delay(bench: Bench) -> None:
    bench.add("a", prompt(9), max_tokens=40)
    for known, lose in ((3, bench.pool.lose), (6, bench.executor.lose), (9, bench.pool.lose)):
        await bench.until_tokens("a", known)
        before = bench.replica.num_reopened
        lose()
        await eventually(lambda before=before: bench.replica.num_reopened > before)
    await bench.until_ended("a")
    assert bench.inbox.tokens["a"] == continuation(prompt(9), 40)


async def test_resetting_is_refused_while_blocks_are_in_use(bench: Bench) -> None:
    bench.add("a", prompt(9), max_tokens=50)
    await bench.until_tokens("a", 2)
    with pytest.raises(FailedPrecondition) as refused:
        await bench.engine.reset_prefix_cache(preempt_running=False)
    assert refused.value.error_reason == "BLOCKS_IN_USE"
    await bench.until_ended("a")
    assert bench.inbox.tokens["a"] == continuation(prompt(9), 50)
    await bench.until_idle()
    await bench.engine.reset_prefix_cache(preempt_running=False)
    assert bench.pool.core.num_cached_hashes == 0


async def test_resetting_may_preempt_and_changes_no_token(bench: Bench) -> None:
    request = bench.add("a", prompt(9), max_tokens=50)
    await bench.until_tokens("a", 2)
    await bench.engine.reset_prefix_cache(preempt_running=True)
    assert bench.pool.core.num_cached_hashes == 0
    await bench.until_ended("a")
    assert request.num_preemptions == 1
    assert bench.inbox.tokens["a"] == continuation(prompt(9), 50)
    await bench.until_idle()


async def test_a_request_whose_logits_broke_ends_and_the_engine_goes_on(bench: Bench) -> None:
    bench.executor.breaks = frozenset({0})
    request = bench.add("a", prompt(5))
    await bench.until_ended("a")
    bench.executor.breaks = frozenset()
    assert request.finish_reason is FinishReason.NAN_IN_LOGITS
    assert bench.inbox.tokens["a"] == []
    bench.add("b", prompt(5), max_tokens=3)
    await bench.until_ended("b")
    await bench.until_idle()


async def test_a_small_pool_preempts_and_still_serves_all_requests() -> None:
    async with running(Bench(num_blocks=12)) as bench:
        wanted = {f"r{number}": prompt(7 + number, 100 * number) for number in range(6)}
        for name, token_ids in wanted.items():
            bench.add(name, token_ids, max_tokens=15)
        await bench.until_ended(*wanted)
        for name, token_ids in wanted.items():
            assert bench.inbox.tokens[name] == continuation(token_ids, 15)
        assert bench.watcher.preempted_ids
        await bench.until_idle()


async def test_a_turn_and_its_next_input_wake_the_engine(bench: Bench) -> None:
    session = bench.add("s", prompt(6), max_tokens=2, resumable=True)
    await eventually(lambda: session.status is RequestStatus.WAITING_FOR_CHUNK)
    await eventually(lambda: bench.engine.state is EngineState.IDLE)
    chunk = InputChunk(prompt(3, 700), SamplingParams(max_tokens=3))
    bench.engine.changes.add_chunk(session, chunk)
    bench.engine.changes.add_chunk(session, None)
    await bench.until_ended("s")
    held = [*prompt(6), *continuation(prompt(6), 1)]
    expected = [*continuation(prompt(6), 2), *continuation([*held, *prompt(3, 700)], 3)]
    assert bench.inbox.tokens["s"] == expected
    bench.engine.changes.add_chunk(session, chunk)
    await bench.until_idle()


async def test_a_session_that_ends_in_a_recovery_leaves_its_place_to_others() -> None:
    async with running(Bench(max_num_seqs=1)) as bench:
        session = bench.add("s", prompt(6), max_tokens=1, resumable=True)
        await eventually(lambda: session.status is RequestStatus.WAITING_FOR_CHUNK)
        bench.add("other", prompt(6, 500), max_tokens=2)
        await eventually(lambda: len(bench.engine.scheduler.queues) == 2)
        await eventually(lambda: bench.engine.state is EngineState.IDLE)
        bench.replica.there.clear()
        bench.engine.lost(WorkersLost("a worker says so"))
        await eventually(lambda: bench.engine.state is EngineState.RECOVERING)
        bench.engine.changes.add_chunk(session, None)
        await bench.until_ended("s")
        bench.replica.there.set()
        await bench.until_ended("other")


async def test_an_engine_sleeps_while_sessions_hold_every_place(bench: Bench) -> None:
    sessions = [
        bench.add(f"s{number}", prompt(6, 100 * number), max_tokens=1, resumable=True)
        for number in range(4)
    ]
    await eventually(lambda: all(one.status is RequestStatus.WAITING_FOR_CHUNK for one in sessions))
    bench.add("other", prompt(6, 500), max_tokens=2)
    await eventually(lambda: len(bench.engine.scheduler.queues) == 5)
    for _ in range(20):
        await asyncio.sleep(0)
    num_planned = bench.watcher.num_planned
    for _ in range(200):
        await asyncio.sleep(0)
    assert bench.watcher.num_planned == num_planned, "no turn is taken in vain"
    bench.engine.changes.add_chunk(sessions[2], None)
    await bench.until_ended("other")
    bench.engine.changes.abort(sessions)
    await bench.until_idle()
