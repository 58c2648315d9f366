"""Limits the requests of a load by number, by time, or by both."""

import math


class Budget:
    """Numbers the requests. The first `num_warmups` are the warm-up and are not measured. After the
    warm-up, at most `num_requests` requests are sent, for at most `seconds`. None means no limit.
    """

    def __init__(self, num_requests: int | None, seconds: float | None, num_warmups: int) -> None:
        self._num_warmups = num_warmups
        self._limit = math.inf if num_requests is None else num_warmups + num_requests
        self._seconds = math.inf if seconds is None else seconds
        self._end = math.inf
        self._num_taken = 0

    def take(self, intended: float) -> int | None:
        """Returns the next request's number, to be sent at `intended` seconds. None at a limit."""
        if self._num_taken == self._num_warmups:
            self._end = intended + self._seconds
        if self._num_taken >= self._limit or intended >= self._end:
            return None
        self._num_taken += 1
        return self._num_taken - 1

    def is_warmup(self, number: int) -> bool:
        return number < self._num_warmups
