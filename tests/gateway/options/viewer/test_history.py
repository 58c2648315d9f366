"""The bounded history of a gateway's last minutes."""

from dataclasses import replace

from services.gateway.options.viewer.core.history import (
    BIN_SECONDS,
    MAX_BINS,
    MAX_EVENTS,
    History,
    ReplicaStatus,
    median_and_p99,
)

ADDRESS = "a:1"
WELL = ReplicaStatus("one", is_ready=True, incarnation="x", num_held_blocks=3, num_blocks=12)


def kinds(history: History) -> list[str]:
    return [event.kind for event in history.events()]


def test_latencies_and_counts_are_of_the_bin_in_which_a_request_ended() -> None:
    history = History()
    history.answered(100.0, 3.0, 1.0, 5, failed=False)
    history.answered(109.0, 5.0, None, 0, failed=True)
    history.answered(131.0, 2.0, 0.5, 1, failed=False)
    first, *between, last = history.bins(131.0)
    assert (first.began, first.whole, first.first_token, first.per_token) == (100, [3], [1], [0.5])
    assert (first.num_ended, first.num_failed, first.num_tokens) == (2, 1, 5)
    assert [one.began for one in between] == [110, 120]
    assert (last.began, last.whole, last.per_token) == (130, [2], [])


def test_all_is_bounded() -> None:
    history = History()
    for number in range(3 * MAX_BINS):
        history.refused(number * BIN_SECONDS, f"reason {number}")
    assert len(history.bins(3 * MAX_BINS * BIN_SECONDS)) == MAX_BINS
    assert len(history.events()) == MAX_EVENTS
    assert len(history.bins(1e9)) <= MAX_BINS


def test_a_clock_that_was_set_back_does_not_stop_the_history() -> None:
    history = History()
    history.refused(7200.0, "queue_full")
    history.answered(3601.0, 3.0, 1.0, 5, failed=False)
    history.refused(3612.0, "queue_full")
    first, last = history.bins(3612.0)
    assert (first.began, first.num_ended, first.num_refused) == (3600, 1, 0)
    assert (last.began, last.num_refused) == (3610, 1)
    assert [event.unix_seconds for event in history.events()] == [7200.0, 3612.0]


def test_what_changes_at_a_replica_is_an_event() -> None:
    history, now = History(), 0.0
    for status in (
        WELL,
        replace(WELL, is_paused=True),
        WELL,
        replace(WELL, is_ready=False, reason="worker 0 is lost", incarnation=""),
        replace(WELL, incarnation="y"),
        replace(WELL, incarnation="y", is_drained=True),
    ):
        now += 100
        history.sampled(now, {ADDRESS: status}, 2)
    assert kinds(history) == ["ready", "paused", "resumed", "lost", "recovered", "drained"]
    assert history.events()[3].text == "worker 0 is lost"
    assert history.bins(now)[-1].held_share == 0.25
    assert history.bins(now)[-1].num_waiting == 2
    assert history.bins(now + 2 * BIN_SECONDS)[-1].num_waiting == 2  # as in the last sample


def test_equal_events_of_a_moment_are_one() -> None:
    history = History()
    for _ in range(50):
        history.refused(100.0, "queue_full")
    history.refused(200.0, "queue_full")
    assert [event.count for event in history.events()] == [50, 1]
    assert history.bins(200.0)[-1].num_refused == 1


def test_median_and_p99() -> None:
    assert median_and_p99([]) is None
    assert median_and_p99([3.0]) == (3.0, 3.0)
    assert median_and_p99([float(number) for number in range(101)]) == (50.0, 99.0)
