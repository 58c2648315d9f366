"""The engine (the loop of the scheduler) plans each step shortly before the running step ends. The
workers' steps take 30 ms of virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from services.common.replica.pause_mode import PauseMode
from services.common.request.finish import FinishReason
from services.scheduler.core.engine.engine_core import EngineState
from services.scheduler.core.engine.planning_clock import MARGIN_SECONDS, MIN_STEPS
from tests.cli.virtual_time import run
from tests.scheduler.engine_bench import Bench, running
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import prompt

STEP_SECONDS = 0.030
T = TypeVar("T")


def tell(story: Callable[[Bench], Awaitable[T]], *, measures: bool = True) -> T:
    """Runs `story` with an engine, starting in the middle of a step in which request a decodes."""

    async def begin() -> T:
        bench = Bench(async_scheduling=True, step_seconds=STEP_SECONDS)
        bench.timed.measures = measures
        async with running(bench):
            bench.add("a", prompt(5), max_tokens=60)
            await bench.until_tokens("a", MIN_STEPS + 4)
            await asyncio.sleep(STEP_SECONDS / 2)
            return await story(bench)

    return run(begin())


@pytest.mark.parametrize(("measures", "steps_later"), [(True, 1), (False, 2)])
def test_a_request_that_comes_in_the_middle_of_a_step_is_part_of_the_next(
    *, measures: bool, steps_later: int
) -> None:
    """Without measurements by the workers, the next step is planned before the request arrives."""

    async def story(bench: Bench) -> None:
        num_begun = bench.timed.num_begun
        bench.add("b", prompt(9, 500), max_tokens=3)
        await bench.until_ended("a", "b")
        first = next(number for number, step in enumerate(bench.timed.steps) if step.has("b"))
        assert first == num_begun - 1 + steps_later
        assert bench.inbox.tokens == {
            "a": continuation(prompt(5), 60),
            "b": continuation(prompt(9, 500), 3),
        }

    tell(story, measures=measures)


def test_workers_do_not_wait_for_steps_that_were_put_off() -> None:
    async def story(bench: Bench) -> None:
        num_begun = bench.timed.num_begun
        await bench.until_ended("a")
        assert bench.timed.gaps == pytest.approx([0] * len(bench.timed.gaps))
        ahead = [step.began - step.arrived for step in bench.timed.steps[num_begun:-1]]
        assert ahead == pytest.approx([MARGIN_SECONDS] * len(ahead))
        assert bench.engine.planning.seconds_late == 0

    tell(story)


def test_a_step_that_ends_before_its_time_is_followed_at_once() -> None:
    async def story(bench: Bench) -> None:
        bench.timed.step_seconds = STEP_SECONDS / 10
        await bench.until_ended("a")
        assert bench.timed.gaps == pytest.approx([0] * len(bench.timed.gaps))
        assert bench.inbox.tokens["a"] == continuation(prompt(5), 60)

    tell(story)


def test_a_request_is_ended_at_once_while_planning_is_put_off() -> None:
    async def story(bench: Bench) -> None:
        request, num_begun = bench.engine.unfinished[0], bench.timed.num_begun
        bench.engine.changes.abort([request])
        assert request.finish_reason is FinishReason.ABORT
        assert bench.inbox.ended == ["a"]
        await asyncio.sleep(2 * STEP_SECONDS)
        assert bench.engine.state is EngineState.IDLE
        assert not any(step.has("a") for step in bench.timed.steps[num_begun:])
        assert bench.executor.num_requests == 0

    tell(story)


def test_a_pause_needs_no_further_step_while_planning_is_put_off() -> None:
    async def story(bench: Bench) -> None:
        num_begun = bench.timed.num_begun
        await bench.engine.pause(PauseMode.KEEP)
        assert (bench.engine.state, len(bench.timed.steps)) == (EngineState.PAUSED, num_begun)
        await bench.engine.resume()
        await bench.until_ended("a")
        assert bench.inbox.tokens["a"] == continuation(prompt(5), 60)

    tell(story)


def test_workers_that_are_lost_while_planning_is_put_off_cost_no_token() -> None:
    async def story(bench: Bench) -> None:
        bench.executor.lose()
        await bench.until_ended("a")
        assert bench.watcher.num_recovered == 1
        assert bench.inbox.tokens["a"] == continuation(prompt(5), 60)

    tell(story)
