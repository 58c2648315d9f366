"""The limits of a replica's waiting queue, and the protobuf message of the queue's state."""

from dataclasses import replace

from services.common.replica.messages import queue_state_from_proto, queue_state_to_proto
from services.common.replica.queue_state import QueueState

QUEUE = QueueState(
    num_waiting=10,
    max_num_waiting=12,
    max_queue_seconds=8.0,
    seconds_per_request=0.5,
    service_seconds=2.0,
    num_running=4,
    is_blocked=True,
    num_free=3,
    seconds_per_prompt=0.125,
)


def reason(queue: QueueState, timeout_seconds: float | None, *, has_output: bool = False) -> str:
    refusal = queue.refusal(timeout_seconds, has_output=has_output)
    return refusal.error_reason if refusal is not None else ""


def test_a_request_is_refused_when_its_wait_leaves_no_time_to_run_it() -> None:
    assert reason(QUEUE, None) == ""
    assert reason(QUEUE, 5.875) == "", "3 prompts of 0.125 s, 7 ends of 0.5 s, 2 s of running"
    assert reason(QUEUE, 5.8) == "QUEUE_TOO_LONG"


def test_requests_that_have_a_place_wait_for_the_prompts_before_them_alone() -> None:
    assert [QUEUE.expected_wait(num_waiting) for num_waiting in (0, 2, 3, 4)] == [
        *(0.0, 0.25, 0.375),
        0.875,
    ]
    unknown = replace(QUEUE, seconds_per_prompt=0.0)
    assert unknown.expected_wait(3) == 1.5, "no longer than where requests have to end"


def test_the_time_to_run_takes_no_more_than_half_of_the_timeout() -> None:
    assert QUEUE.longest_wait(3.0, has_output=False) == 1.5
    assert QUEUE.longest_wait(100.0, has_output=False) == 8.0


def test_a_request_with_output_is_bound_by_its_timeout_alone() -> None:
    slow = QueueState(10, 12, max_queue_seconds=3.0, seconds_per_request=0.5)
    assert reason(slow, None) == "QUEUE_TOO_LONG"
    assert reason(slow, None, has_output=True) == ""
    assert slow.longest_wait(None, has_output=True) is None


def test_a_refusal_says_when_to_try_again() -> None:
    refusal = QUEUE.refusal(2.5)
    assert refusal is not None
    assert refusal.message == "the request would wait for about 3.9 s, but may wait only 1.2 s"
    assert refusal.retry_after_seconds == 2.625
    full = QueueState(12, 12, max_queue_seconds=0.0).refusal(None)
    assert full is not None
    assert (full.error_reason, full.retry_after_seconds) == ("QUEUE_FULL", 1.0)


def test_a_state_travels_whole() -> None:
    assert queue_state_from_proto(queue_state_to_proto(QUEUE)) == QUEUE
