"""A replica's queue, and whether it takes one more request."""

from dataclasses import dataclass

from services.common.errors import ResourceExhausted

RETRY_AFTER_SECONDS = 1.0
"""Shortest time after which a refused client should try again."""


def longest_wait(timeout_seconds: float, service_seconds: float) -> float:
    """How long a request with a timeout may wait: what its usual running time, at most half of the
    timeout, leaves.
    """
    return timeout_seconds - min(service_seconds, timeout_seconds / 2)


@dataclass(frozen=True, slots=True)
class QueueState:
    """How long a replica's queue is and how fast it moves. The scheduler decides by it which
    requests to queue; a gateway by a copy, so that most refusals need no scheduler.
    """

    num_waiting: int
    max_num_waiting: int
    max_queue_seconds: float
    """Longest time that a request without output may wait to be scheduled; 0: no limit."""
    seconds_per_request: float = 0.0
    """Delay of the requests behind each one that waits until another one ends; 0: not known."""
    service_seconds: float = 0.0
    """Time from a request's admission to its end; 0: not known."""
    num_running: int = 0
    is_blocked: bool = False
    """Whether requests wait since the last step had no blocks or no tokens for them."""
    num_free: int = 0
    """Waiting requests for which there are places and blocks, so that none has to end before."""
    seconds_per_prompt: float = 0.0
    """Delay of the requests behind each of these, by its prompt; 0: not known."""

    def expected_wait(self, num_waiting: int) -> float:
        """Seconds until a request is scheduled that has `num_waiting` before it."""
        num_with_place = min(num_waiting, self.num_free)
        seconds_per_prompt = self.seconds_per_prompt or self.seconds_per_request
        num_behind = num_waiting - num_with_place
        return num_with_place * seconds_per_prompt + num_behind * self.seconds_per_request

    def longest_wait(self, timeout_seconds: float | None, *, has_output: bool) -> float | None:
        """Time that a request may wait to be scheduled; None: as long as it takes. Only its
        client's timeout bounds a request with output.
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
        """Why one more request is refused while `num_waiting` wait; None if it is taken."""
        longest = self.longest_wait(timeout_seconds, has_output=has_output)
        return self.refusal_within(longest, num_waiting)

    def refusal_within(
        self, longest: float | None, num_waiting: int | None = None
    ) -> ResourceExhausted | None:
        """The same of a request of which it is known how long it may wait: see `longest_wait`."""
        if num_waiting is None:
            num_waiting = self.num_waiting
        if num_waiting >= self.max_num_waiting:
            return ResourceExhausted(
                f"{self.max_num_waiting} requests wait already",
                reason="QUEUE_FULL",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        wait = self.expected_wait(num_waiting)
        if longest is None or wait <= longest:
            return None
        return ResourceExhausted(
            f"the request would wait for about {wait:.1f} s, and may for {longest:.1f} s",
            reason="QUEUE_TOO_LONG",
            retry_after_seconds=max(RETRY_AFTER_SECONDS, wait - longest),
        )
