"""The number of computed tokens of a request, which many requests can share (see
`RunningRequests`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(slots=True, eq=False)
class StepClock:
    now: int = 0


STOPPED = StepClock()
"""The clock of requests off the fast path, which stays at 0."""


@dataclass(slots=True, eq=False)
class ComputedTokens:
    """The base class of `Request`, which stores the number of computed tokens."""

    is_on_fast_path: bool = field(init=False, default=False)
    """Whether each step computes exactly one more token of the request, in the same blocks."""
    origin: int = field(init=False, default=0)
    clock: StepClock = field(init=False, default=STOPPED)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose keys and values are stored once all planned steps have run."""
        return self.origin + self.clock.now

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        self.origin = num_tokens - self.clock.now


R = TypeVar("R", bound=ComputedTokens)


def num_computed_tokens_of(requests: Iterable[ComputedTokens]) -> list[int]:
    """`num_computed_tokens` of each request, without calling the property, which is slower."""
    return [request.origin + request.clock.now for request in requests]


def with_num_computed_tokens(requests: Iterable[R]) -> list[tuple[R, int]]:
    return [(request, request.origin + request.clock.now) for request in requests]
