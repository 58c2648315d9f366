"""When the next step is planned while another step runs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.engine.planning_clock import (
    LEAST_SECONDS,
    MARGIN_SECONDS,
    MIN_STEPS,
    RECENT_STEPS,
    PlanningClock,
)

MILLI = 1e-3
Seconds = st.floats(0, 0.1)


def run_steps(clock: PlanningClock, count: int, room: float, num_tokens: int = 8) -> None:
    """Runs `count` steps of one size in a row. If planning starts later than `room` after the start
    of such a step, the workers must wait for the next step.
    """
    for step in range(count):
        clock.begins(num_tokens, 100.0)
        clock.planned(step, clock.due)
        clock.answered(step, room - (clock.due - 100.0))


def put_off(clock: PlanningClock, num_tokens: int = 8) -> float:
    clock.begins(num_tokens, 50.0)
    return clock.due - 50.0


def test_a_step_is_planned_at_once_until_some_of_its_size_have_been_measured() -> None:
    clock = PlanningClock()
    run_steps(clock, MIN_STEPS - 1, 30 * MILLI)
    assert put_off(clock) == 0
    run_steps(clock, 1, 30 * MILLI)
    assert put_off(clock) == pytest.approx(30 * MILLI - MARGIN_SECONDS)


def test_steps_of_another_size_have_a_room_of_their_own() -> None:
    clock = PlanningClock()
    run_steps(clock, MIN_STEPS, 30 * MILLI, num_tokens=8)
    run_steps(clock, MIN_STEPS, 90 * MILLI, num_tokens=500)
    assert put_off(clock, 15) == pytest.approx(29 * MILLI)
    assert put_off(clock, 16) == 0
    assert put_off(clock, 256) == pytest.approx(89 * MILLI)


def test_few_steps_with_less_room_are_outliers_and_more_of_them_are_not() -> None:
    clock = PlanningClock()
    run_steps(clock, RECENT_STEPS, 30 * MILLI)
    run_steps(clock, 4, 24 * MILLI)
    assert clock.seconds_late == pytest.approx(4 * 5 * MILLI)
    assert put_off(clock) == pytest.approx(29 * MILLI)
    run_steps(clock, 1, 24 * MILLI)
    assert put_off(clock) == pytest.approx((24 - 6 - 1) * MILLI)
    run_steps(clock, RECENT_STEPS - 4, 30 * MILLI)
    assert put_off(clock) == pytest.approx(29 * MILLI)
    assert clock.seconds_late == pytest.approx(5 * 5 * MILLI)


def test_where_times_vary_much_steps_are_planned_at_once() -> None:
    clock = PlanningClock()
    for room in (9 * MILLI, 30 * MILLI) * 20:
        run_steps(clock, 1, room)
    assert put_off(clock) == 0


def test_where_there_is_hardly_any_room_nothing_is_put_off() -> None:
    clock = PlanningClock()
    run_steps(clock, MIN_STEPS, LEAST_SECONDS + 0.9 * MARGIN_SECONDS)
    assert put_off(clock) == 0


def test_steps_that_are_done_before_the_next_was_planned_are_put_off_less() -> None:
    """Steps had a room for delays of 30 ms. Now they take 10 ms, and have a room of 8 ms."""
    clock = PlanningClock()
    run_steps(clock, MIN_STEPS, 30 * MILLI)
    for step in range(RECENT_STEPS):
        clock.begins(8, 100.0)
        began = min(clock.due, 100.0 + 10 * MILLI)
        clock.planned(step, began)
        clock.answered(step, 100.0 + 8 * MILLI - began)
    assert put_off(clock) == pytest.approx(7 * MILLI)


def test_planning_that_began_late_for_another_reason_counts_as_messages_do() -> None:
    """Planning was due at once, but began 4 ms later. The step arrived 20 ms before the workers
    could run it. The 4 ms do not count as room for delays. Neither do the times of planning and of
    messages.
    """
    clock = PlanningClock()
    for step in range(MIN_STEPS):
        clock.begins(8, 100.0)
        clock.planned(step, 100.0 + 4 * MILLI)
        clock.answered(step, 20 * MILLI)
        assert clock.seconds_put_off == 0
    assert put_off(clock) == pytest.approx(19 * MILLI)


def test_steps_of_workers_that_do_not_measure_are_planned_at_once() -> None:
    clock = PlanningClock()
    for step in range(2 * MIN_STEPS):
        clock.begins(8, 100.0)
        clock.planned(step, clock.due)
        clock.answered(step, None)
    assert put_off(clock) == 0
    assert (clock.num_planned, clock.seconds_put_off, clock.seconds_late) == (2 * MIN_STEPS, 0, 0)


def test_only_steps_that_were_planned_while_another_ran_tell_anything() -> None:
    """The first step after an idle time arrives long after the previous step has ended, but not
    because it was planned too late.
    """
    clock = PlanningClock()
    run_steps(clock, MIN_STEPS, 30 * MILLI)
    clock.answered(1000, -60.0)
    assert put_off(clock) == pytest.approx(29 * MILLI)
    assert clock.seconds_late == 0


def test_other_workers_are_measured_anew() -> None:
    clock = PlanningClock()
    run_steps(clock, MIN_STEPS, 30 * MILLI)
    clock.planned(9, 100.0)
    clock.forget()
    clock.answered(9, 30 * MILLI)
    assert put_off(clock) == 0


@given(rooms=st.lists(Seconds, max_size=2 * RECENT_STEPS), now=st.floats(0, 1e6))
def test_nothing_is_put_off_for_longer_than_the_room_of_nearly_all_recent_steps(
    rooms: list[float], now: float
) -> None:
    clock = PlanningClock()
    for room in rooms:
        run_steps(clock, 1, room)
    clock.begins(8, now)
    seconds = clock.due - now
    assert seconds == 0 or seconds >= LEAST_SECONDS - 1e-9
    if seconds:
        recent = rooms[-RECENT_STEPS:]
        num_shorter = sum(room < seconds + MARGIN_SECONDS - 1e-9 for room in recent)
        assert num_shorter <= len(recent) / 16


@given(
    seed=st.integers(0, 1000),
    step_seconds=st.floats(4 * MILLI, 80 * MILLI),
    jitter=st.floats(0, 2 * MILLI),
    overhead=st.floats(0.1 * MILLI, 2 * MILLI),
)
def test_workers_seldom_wait_and_never_for_longer_than_planning_takes(
    seed: int, step_seconds: float, jitter: float, overhead: float
) -> None:
    """Each step is planned when it is due, at the latest when the step before ends. Planning and
    sending a step take `overhead` seconds.
    """
    draw, clock = random.Random(seed), PlanningClock()
    began, waits, delays = 0.0, [], []
    for step in range(4 * RECENT_STEPS):
        clock.begins(8, began)
        ended = began + step_seconds + draw.uniform(0, jitter)
        planned = min(max(clock.due, began), ended)
        ready = planned + overhead + draw.uniform(0, jitter / 4)
        clock.planned(step, planned)
        clock.answered(step, ended - ready)
        waits.append(max(0.0, ready - ended))
        delays.append(ended - planned)
        began = max(ready, ended)
    assert clock.seconds_late == pytest.approx(sum(waits))
    assert max(waits) <= overhead + jitter / 4 + 1e-9
    settled = waits[RECENT_STEPS:]
    assert sum(settled) <= 0.001 * len(settled) * step_seconds
    # A request that arrives waits only for the end of the running step, not of the next one.
    longest = overhead + 3 * jitter + MARGIN_SECONDS + LEAST_SECONDS
    assert max(delays[RECENT_STEPS:]) <= longest + 1e-9
