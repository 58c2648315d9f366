"""The lease of a pool or worker belongs to one scheduler, until a while after the last release."""

import pytest

from services.common.errors import FailedPrecondition
from services.common.pool.lease import Holder, Lease

FIRST = Holder("replica-0", 1_000_000_000)
SECOND = Holder("replica-1", 2_000_000_000)
GRACE_SECONDS = 2.0


class Timer:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def timer() -> Timer:
    return Timer()


@pytest.fixture
def lease(timer: Timer) -> Lease:
    return Lease("worker", GRACE_SECONDS, timer)


def test_a_second_scheduler_is_refused_with_the_name_of_the_first(lease: Lease) -> None:
    lease.take(FIRST)
    with pytest.raises(FailedPrecondition) as refused:
        lease.take(SECOND)
    assert refused.value.error_reason == "TAKEN"
    assert refused.value.message == (
        "the worker is in use by scheduler 'replica-0', started at 1970-01-01 00:00:01 UTC"
    )
    lease.take(FIRST)


def test_it_is_free_a_while_after_the_last_release(lease: Lease, timer: Timer) -> None:
    lease.take(FIRST)
    lease.take(FIRST)
    lease.release(FIRST)
    timer.now = 10.0
    with pytest.raises(FailedPrecondition):
        lease.take(SECOND)
    lease.release(FIRST)
    timer.now = 11.9
    with pytest.raises(FailedPrecondition):
        lease.take(SECOND)
    timer.now = 12.0
    lease.take(SECOND)


def test_a_later_process_of_the_same_name_takes_over_for_good(lease: Lease) -> None:
    lease.take(FIRST)
    later = Holder("replica-0", 5_000_000_000)
    lease.take(later)
    lease.release(FIRST)
    with pytest.raises(FailedPrecondition, match="started at 1970-01-01 00:00:05 UTC"):
        lease.take(FIRST)
    lease.take(later)


def test_a_process_that_hung_does_not_take_back_what_another_got_after_the_clock_was_set_back(
    lease: Lease, timer: Timer
) -> None:
    hung, earlier = Holder("replica-0", 5_000_000_000), Holder("replica-0", 3_000_000_000)
    lease.take(hung)
    with pytest.raises(FailedPrecondition):
        lease.take(earlier)
    lease.release(hung)
    timer.now = GRACE_SECONDS
    lease.take(earlier)
    with pytest.raises(FailedPrecondition, match="started at 1970-01-01 00:00:03 UTC"):
        lease.take(hung)
    lease.release(earlier)
    timer.now += GRACE_SECONDS
    lease.take(hung)


def test_a_scheduler_without_a_name_is_one_like_any_other(lease: Lease) -> None:
    lease.take(Holder("", 0))
    lease.take(Holder("", 0))
    with pytest.raises(FailedPrecondition, match="a scheduler without a name"):
        lease.take(FIRST)
