"""The deadlines of steps and of pool transactions."""

from services.scheduler.core.engine.deadlines import Deadlines


def test_what_was_not_measured_may_take_the_longest_time() -> None:
    deadlines = Deadlines(2.0, 120.0)
    deadlines.took(1, 0.01)
    assert deadlines.seconds(1) == 2.0
    assert deadlines.seconds(2) == 120.0


def test_ten_times_the_longest_time_lately_is_allowed() -> None:
    deadlines = Deadlines(2.0, 120.0)
    for seconds in (1.0, 3.0, 2.0):
        deadlines.took(600, seconds)
    assert 29 < deadlines.seconds(1023) <= 30
    deadlines.took(600, 50.0)
    assert deadlines.seconds(512) == 120.0
    for _ in range(500):
        deadlines.took(600, 0.1)
    assert deadlines.seconds(600) == 2.0


def test_a_ceiling_below_the_floor_is_the_deadline() -> None:
    deadlines = Deadlines(2.0, 0.3)
    assert deadlines.seconds(1) == 0.3
    deadlines.took(1, 0.001)
    assert deadlines.seconds(1) == 0.3


def test_another_process_is_measured_anew() -> None:
    deadlines = Deadlines(2.0, 120.0)
    deadlines.took(0, 0.01)
    deadlines.forget()
    assert deadlines.seconds(0) == 120.0
