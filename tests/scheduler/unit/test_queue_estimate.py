"""How long a request would wait, and which requests have waited too long."""

from services.scheduler.core.queue_estimate import MARGIN, QueueEstimate


def sampled(estimate: QueueEstimate, seconds: int, *, rate: int, num_waiting: int = 50) -> None:
    """Ten samples a second in which `rate` requests a second end, of 20 that run."""
    for number in range(10 * seconds + 1):
        now = number / 10
        estimate.sample(
            now, num_running=20, num_waiting=num_waiting, num_completed=int(rate * now + 1e-9)
        )


def test_the_wait_is_that_of_the_requests_ahead_at_the_rate_at_which_requests_end() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 10, rate=5)
    assert abs(estimate.wait_seconds(100) - 20.0 * MARGIN) < 1.0
    assert abs(estimate.service_seconds - 4.0 * MARGIN) < 0.3, "20 run, and 5 end in a second"
    assert estimate.wait_seconds(0) == 0.0


def test_nothing_is_estimated_from_a_few_requests() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 1, rate=5)
    assert estimate.wait_seconds(100) == 0.0


def test_without_a_queue_the_rate_is_that_of_as_many_as_could_run() -> None:
    estimate = QueueEstimate(100)
    sampled(estimate, 60, rate=1, num_waiting=0)
    assert abs(estimate.wait_seconds(100) - 20.0 * MARGIN) < 1.0, "20 of 100 run: 5 a second could"


def test_a_rate_that_changes_is_followed() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 60, rate=2)
    estimate.stand_still()
    sampled(estimate, 10, rate=20)
    assert abs(estimate.wait_seconds(100) - 5.0 * MARGIN) < 0.5


def test_time_in_which_no_request_can_run_does_not_count() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 10, rate=5)
    before = estimate.wait_seconds(100)
    estimate.stand_still()
    estimate.sample(1000.0, num_running=20, num_waiting=50, num_completed=50)
    assert estimate.wait_seconds(100) == before


def test_a_replica_that_stops_to_make_progress_is_estimated_slower() -> None:
    estimate = QueueEstimate(20)
    sampled(estimate, 10, rate=5)
    for now in range(11, 31):
        estimate.sample(now, num_running=20, num_waiting=50, num_completed=50)
    assert estimate.wait_seconds(100) > 50.0
