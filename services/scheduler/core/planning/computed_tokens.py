"""Stores the number of computed tokens of each request, in such a way that a step does not have to
update every request.

Most running requests decode, and each step computes one more token of each. While nothing else
about a request changes, it is on the fast path. The count is the sum of an origin, which each
request has, and a clock, which all requests on the fast path share. Planning a step advances the
clock, and so all these counts. Other modules read and set `num_computed_tokens` and do not depend
on this representation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar


@dataclass(slots=True, eq=False)
class StepClock:
    """Counts the steps that were planned."""

    now: int = 0


_STOPPED = StepClock()
"""The clock of requests that are not on the fast path. It stays at 0, so their count is the origin.
"""


@dataclass(slots=True, eq=False)
class ComputedTokens:
    """The number of computed tokens of one request. The base class of `Request`."""

    is_on_fast_path: bool = field(init=False, default=False)
    """Whether each step computes exactly one more token of the request and needs no further block.
    The only reason for which such a step can end the request is the token that it samples.
    """
    origin: int = field(init=False, default=0)
    clock: StepClock = field(init=False, default=_STOPPED)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose keys and values are stored, or will be stored once the steps in
        flight have run.
        """
        return self.origin + self.clock.now

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        self.origin = num_tokens - self.clock.now


_Request = TypeVar("_Request", bound=ComputedTokens)


def enter_fast_path(requests: Iterable[ComputedTokens], clock: StepClock) -> None:
    """Makes the counts of these requests grow with `clock`."""
    now = clock.now
    for request in requests:
        request.origin -= now
        request.clock = clock
        request.is_on_fast_path = True


def leave_fast_path(requests: Iterable[ComputedTokens]) -> None:
    """Detaches the counts of these requests from their clock, at their present values."""
    for request in requests:
        request.origin += request.clock.now
        request.clock = _STOPPED
        request.is_on_fast_path = False


def set_off_fast_path(num_computed_tokens: Mapping[Any, int]) -> None:
    """Sets the counts of requests that are not on the fast path."""
    for request, num_tokens in num_computed_tokens.items():
        request.origin = num_tokens


def num_computed_tokens_of(requests: Iterable[ComputedTokens]) -> list[int]:
    """The counts of many requests, without a property call for each request."""
    return [request.origin + request.clock.now for request in requests]


def with_num_computed_tokens(requests: Iterable[_Request]) -> list[tuple[_Request, int]]:
    """Pairs each request with its count."""
    return [(request, request.origin + request.clock.now) for request in requests]
