"""Computes from given readings for how long a watched process was silent although it could run."""

from dataclasses import replace

import pytest

from services.common.process.watchdog.silence import (
    MachineTimes,
    ProcessTimes,
    Reading,
    Silence,
    ThreadTimes,
)

QUIET = MachineTimes(num_runnable=2, num_processors=2)
BUSY = MachineTimes(num_runnable=100, num_processors=2)
IDLE = ThreadTimes("S", 0, 0)
PERIOD = 0.25


def process(**threads: ThreadTimes) -> ProcessTimes:
    return ProcessTimes(dict(enumerate(threads.values())))


def after(seconds: float, state: str, ran: float, waited: float) -> ThreadTimes:
    """The times of a thread in `seconds`. `ran` and `waited` are the fractions of this time in
    which it ran and in which it waited for a processor.
    """
    return ThreadTimes(state, ran * seconds, waited * seconds)


def counted(
    seconds: float,
    state: str,
    *,
    ran: float = 0,
    waited: float = 0,
    watcher_waited: float = 0,
    machine: MachineTimes = QUIET,
) -> float:
    """The silence after `seconds` of a process with two threads. One sleeps. The other has the
    state `state`, and the fractions `ran` and `waited`.
    """
    watch = Silence(0.0)
    for number in range(1, round(seconds / PERIOD) + 1):
        now = number * PERIOD
        watched = process(main=IDLE, other=after(now, state, ran, waited))
        watcher = process(main=after(now, "S", 0.01, watcher_waited))
        watch.look(Reading(now, watcher, [watched], machine))
    return watch.seconds


@pytest.mark.parametrize("machine", [QUIET, BUSY])
def test_the_silence_of_a_stopped_process_counts_in_full(machine: MachineTimes) -> None:
    assert counted(2.0, "T", waited=0.1, machine=machine) == pytest.approx(2.0)


def test_the_silence_of_a_deadlock_counts_in_full() -> None:
    assert counted(2.0, "S") == pytest.approx(2.0)


def test_the_silence_of_an_endless_loop_counts_in_full() -> None:
    assert counted(2.0, "R", ran=1.0) == pytest.approx(2.0)


def test_time_that_a_thread_waits_for_a_processor_does_not_count() -> None:
    assert counted(100.0, "R", ran=0.01, waited=0.99) == pytest.approx(1.0)


def test_a_wait_counts_as_one_before_the_counter_shows_it() -> None:
    """The kernel's counter of waits (sched_info) includes a wait only when the wait has ended."""
    assert counted(100.0, "R", ran=0.01, waited=0.0) == pytest.approx(1.0)


def test_a_deadlock_is_found_on_a_busy_machine_too() -> None:
    assert counted(4.0, "S", waited=0.4, machine=BUSY) == pytest.approx(2.4)


def test_time_that_the_watcher_waits_for_a_processor_does_not_count() -> None:
    assert counted(10.0, "S", watcher_waited=0.8) == pytest.approx(2.0)


def test_of_a_late_look_only_the_usual_time_between_looks_counts() -> None:
    watch = Silence(0.0, longest_first_seconds=0.1, longest_turn_seconds=0.5)
    for now in (0.25, 0.5, 30.0):
        watch.look(Reading(now, watched=[process(main=IDLE)], machine=QUIET))
    assert watch.seconds == pytest.approx(0.85)


def test_a_stall_of_the_disk_does_not_count_and_an_endless_wait_for_it_does() -> None:
    def silence(stalled_share: float) -> float:
        watch = Silence(0.0)
        for now in (1.0, 2.0, 3.0, 4.0):
            machine = replace(QUIET, stalled=stalled_share * now)
            watch.look(
                Reading(now, watched=[process(main=ThreadTimes("D", 0, 0))], machine=machine)
            )
        return watch.seconds

    assert silence(0.75) == pytest.approx(1.0)
    assert silence(0.0) == pytest.approx(4.0)


@pytest.mark.parametrize(("num_runnable", "seconds"), [(1, 2.0), (4, 2.0), (8, 1.0), (100, 0.08)])
def test_a_process_that_is_not_known_is_judged_by_the_run_queue(
    num_runnable: int, seconds: float
) -> None:
    machine = replace(QUIET, num_runnable=num_runnable)
    watch = Silence(0.0)
    for now in (1.0, 1.5, 2.0):
        watch.look(Reading(now, machine=machine))
    assert watch.seconds == pytest.approx(seconds)


def test_time_before_the_first_reading_counts_like_the_time_after_it() -> None:
    """Otherwise a process that waits for a processor would count as hung at its first readings."""
    watch = Silence(0.0)
    looks = [
        watch.look(Reading(2.0 + wait, watched=[process(main=ThreadTimes("R", 0.1 * wait, 0))]))
        for wait in (0.0, PERIOD, 2 * PERIOD)
    ]
    assert looks == pytest.approx([1.75, 0.225, 0.25])


def test_a_process_that_wants_no_processor_is_judged_at_the_first_look() -> None:
    assert Silence(0.0).look(Reading(2.0, watched=[process(main=IDLE)])) == pytest.approx(2.0)


def test_processes_that_were_replaced_between_two_looks_are_judged_by_the_run_queue() -> None:
    watch = Silence(0.0)
    watch.look(Reading(1.0, watched=[process(main=IDLE)], machine=QUIET))
    assert watch.look(Reading(2.0, machine=replace(QUIET, num_runnable=8))) == pytest.approx(1.0)


def test_without_proc_all_silence_counts() -> None:
    watch = Silence(0.0)
    assert [watch.look(Reading(now)) for now in (1.0, 2.0)] == pytest.approx([1.0, 2.0])
