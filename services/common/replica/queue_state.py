"""A replica's queue, and whether it accepts another request."""

from dataclasses import dataclass

from services.common.errors import ResourceExhausted

RETRY_AFTER_SECONDS = 1.0
"""The shortest retry time that a rejected client receives."""


def longest_wait(timeout_seconds: float, service_seconds: float) -> float:
    """Limit on the seconds that a request with a timeout may wait in the queue. The limit is the
    timeout minus the usual service time, but at least half of the timeout.
    """
    return timeout_seconds - min(service_seconds, timeout_seconds / 2)


@dataclass(frozen=True, slots=True)
class QueueState:
    """The length and speed of a replica's queue. The scheduler decides by this state which requests
    to queue. A gateway uses a copy, so that most rejections do not involve the scheduler.
    """

    num_waiting: int
    max_num_waiting: int
    max_queue_seconds: float
    """Limit on the time that a request without output waits to be scheduled. 0 means no limit."""
    seconds_per_request: float = 0.0
    """Estimated seconds that a waiting request adds to the wait of each request behind it. 0 if
    unknown. The first `num_free` requests add `seconds_per_prompt` instead.
    """
    service_seconds: float = 0.0
    """Estimated seconds from a request's admission to its end. 0 if unknown."""
    num_running: int = 0
    is_blocked: bool = False
    """Whether requests wait because the last step lacked free blocks or token budget for them."""
    num_free: int = 0
    """Number of requests at the head of the queue for which slots and blocks are already free."""
    seconds_per_prompt: float = 0.0
    """Seconds that each of the first `num_free` requests adds to the wait of each request behind
    it, because its prompt must be computed. 0 if unknown.
    """

    def expected_wait(self, num_waiting: int) -> float:
        """Seconds until a request with `num_waiting` requests ahead of it is scheduled."""
        num_with_slot = min(num_waiting, self.num_free)
        seconds_per_prompt = self.seconds_per_prompt or self.seconds_per_request
        num_behind = num_waiting - num_with_slot
        return num_with_slot * seconds_per_prompt + num_behind * self.seconds_per_request

    def longest_wait(self, timeout_seconds: float | None, *, has_output: bool) -> float | None:
        """Limit on the seconds that a request waits until it is scheduled. None means no limit. If
        the request has output already, only the client's timeout limits its wait.
        """
        longest = None if has_output else self.max_queue_seconds or None
        if timeout_seconds is None:
            return longest
        left = longest_wait(timeout_seconds, self.service_seconds)
        return left if longest is None else min(left, longest)

    def refusal(
        self,
        timeout_seconds: float | None,
        *,
        has_output: bool = False,
        num_waiting: int | None = None,
    ) -> ResourceExhausted | None:
        """Returns the error that rejects a request behind `num_waiting` requests (by default, all
        queued requests). None if the request may be queued.
        """
        longest = self.longest_wait(timeout_seconds, has_output=has_output)
        return self.refusal_within(longest, num_waiting)

    def refusal_within(
        self, longest: float | None, num_waiting: int | None = None
    ) -> ResourceExhausted | None:
        """As `refusal`, for a request that may wait for at most `longest` seconds. `longest` is a
        result of `longest_wait`, or None for no limit.
        """
        if num_waiting is None:
            num_waiting = self.num_waiting
        if num_waiting >= self.max_num_waiting:
            return ResourceExhausted(
                f"the replica's queue is full: {self.max_num_waiting} requests are waiting",
                reason="QUEUE_FULL",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        wait = self.expected_wait(num_waiting)
        if longest is None or wait <= longest:
            return None
        return ResourceExhausted(
            f"the request would wait for about {wait:.1f} s, but may wait only {longest:.1f} s",
            reason="QUEUE_TOO_LONG",
            retry_after_seconds=max(RETRY_AFTER_SECONDS, wait - longest),
        )
