"""The estimate of how long a request waits in the queue."""

from services.scheduler.core.engine.queue_estimate import MARGIN, QueueEstimate, expected_tokens


def sampled(estimate: QueueEstimate, seconds: int, *, rate: int, num_waiting: int = 50) -> None:
    for number in range(10 * seconds + 1):
        now = number / 10
        estimate.sample(
            now,
            num_running=20,
            num_waiting=num_waiting,
            num_completed=int(rate * now + 1e-9),
            num_tokens=0,
            tokens_per_request=100.0,
        )


def hold_on(estimate: QueueEstimate, now: float) -> None:
    estimate.sample(
        now,
        num_running=20,
        num_waiting=50,
        num_completed=50,
        num_tokens=0,
        tokens_per_request=100.0,
    )


def test_the_wait_is_that_of_the_requests_ahead_at_the_rate_at_which_requests_end() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 10, rate=5)
    assert abs(100 * estimate.seconds_per_request - 20.0 * MARGIN) < 1.0
    assert abs(estimate.service_seconds - 4.0 * MARGIN) < 0.3, "20 run, and 5 end in a second"


def test_nothing_is_estimated_from_a_few_requests() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 1, rate=5)
    assert 100 * estimate.seconds_per_request == 0.0


def test_without_a_queue_the_rate_is_that_of_as_many_as_could_run() -> None:
    estimate = QueueEstimate(100)
    sampled(estimate, 60, rate=1, num_waiting=0)
    assert abs(100 * estimate.seconds_per_request - 20.0 * MARGIN) < 1.0, (
        "20 of 100 run: 5 a second could"
    )


def test_time_in_which_few_run_counts_as_if_all_did() -> None:
    """10 of at most 40 requests run, and 5 end per second. Steps of 40 take three times as long."""
    estimate = QueueEstimate(40)
    for number in range(101):
        estimate.sample(
            number / 10, num_running=10, num_waiting=0, num_completed=number // 2, slowdown=3.0
        )
    assert abs(estimate.service_seconds - 3 * 2.0 * MARGIN) < 0.3
    assert abs(estimate.seconds_per_request - 3 * 2.0 / 40 * MARGIN) < 0.01


def test_a_rate_that_changes_is_followed() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 60, rate=2)
    estimate.stand_still()
    sampled(estimate, 10, rate=20)
    assert abs(100 * estimate.seconds_per_request - 5.0 * MARGIN) < 0.5


def test_time_in_which_no_request_can_run_does_not_count() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 10, rate=5)
    before = 100 * estimate.seconds_per_request
    estimate.stand_still()
    hold_on(estimate, 1000.0)
    assert 100 * estimate.seconds_per_request == before


def test_a_replica_that_stops_to_make_progress_is_estimated_slower() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 10, rate=5)
    for now in range(11, 31):
        hold_on(estimate, now)
    assert 100 * estimate.seconds_per_request > 50.0


def test_before_requests_have_ended_computed_tokens_tell_the_rate() -> None:
    estimate = QueueEstimate(20)
    for number in range(11):
        estimate.sample(
            number / 10,
            num_running=20,
            num_waiting=50,
            num_completed=0,
            num_tokens=100 * number,
            tokens_per_request=200.0,
        )
        if number == 4:
            assert estimate.seconds_per_request == 0.0, "the first steps take longer"
    assert estimate.counts_tokens
    assert abs(estimate.seconds_per_request - 0.2 * MARGIN) < 1e-6, "200 of 1000 a second"
    assert abs(estimate.service_seconds - 4.0 * MARGIN) < 1e-6, "each of 20 gets 50 a second"
    sampled(estimate, 10, rate=5)
    assert not estimate.counts_tokens


def test_an_answer_is_expected_to_become_twice_as_long_as_it_is_within_its_bound() -> None:
    assert expected_tokens(30, 0, 200) == 30
    assert expected_tokens(30, 40, 200) == 110
    assert expected_tokens(30, 100, 200) == 200
