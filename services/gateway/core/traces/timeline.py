"""Where the time of a request goes at the gateway, as numbers: spans are made of them in the end,
if the request is to have any.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.common.telemetry import names

MAX_STRETCHES = 64
"""Kept of one timeline; sequences that are refused again and again would have thousands."""

Details = Mapping[str, str | int | float | bool]


class Part(enum.Enum):
    """What is being done with a request, or a sequence of one."""

    ADMIT = names.SPAN_GATEWAY_ADMIT
    """Its key and its tenant's limits are looked up, and whether there is room for it."""
    READ = names.SPAN_GATEWAY_READ
    PARSE = names.SPAN_GATEWAY_PARSE
    TOKENIZE = names.SPAN_GATEWAY_TOKENIZE
    PREPARE = names.SPAN_GATEWAY_PREPARE
    """Its parameters are checked, and its sequences made."""
    WAIT = names.SPAN_GATEWAY_WAIT
    """It waits here, for a reason that its details name."""
    GENERATE = names.SPAN_GATEWAY_GENERATE
    """From its start at the fleet to the end of its last sequence."""
    ROUTE = names.SPAN_GATEWAY_ROUTE
    """A replica is chosen for a sequence."""
    ENGINE = names.SPAN_GATEWAY_ENGINE
    """A sequence is at a replica."""
    RESUBMIT = names.SPAN_GATEWAY_RESUBMIT
    """A sequence has left a replica without its end, for a cause that its details name, and waits
    for the next one.
    """
    WRITE = names.SPAN_GATEWAY_WRITE
    """The client is sent what the sequences gave it last."""


@dataclass(slots=True)
class Stretch:
    """The time of one part, from `began` to the next one's beginning."""

    part: Part
    began: int
    details: Details | None = None
    outcome: str = ""


class Timeline:
    """Parts in a row: each begins where the one before it ends, so that together they are the whole
    time. Times are nanoseconds of the given clock.

    Beyond MAX_STRETCHES, time counts to the last part that is kept.
    """

    __slots__ = ("_nanos", "ended", "num_dropped", "stretches")

    def __init__(self, nanos: Callable[[], int], part: Part, began: int | None = None) -> None:
        self._nanos = nanos
        self.stretches = [Stretch(part, nanos() if began is None else began)]
        self.ended: int | None = None
        self.num_dropped = 0

    @property
    def part(self) -> Part:
        """The present part, or the last one."""
        return self.stretches[-1].part

    @property
    def began(self) -> int:
        return self.stretches[0].began

    def now(self) -> int:
        return self._nanos()

    def enter(
        self, part: Part, details: Details | None = None, outcome: str = "", at: int | None = None
    ) -> None:
        """The part before ends, with an outcome, and this one begins, now or at an earlier time.
        Goes on with a part of the same kind and details; does nothing after the end.
        """
        last = self.stretches[-1]
        if self.ended is not None or (last.part is part and last.details == details):
            return
        last.outcome = outcome
        if len(self.stretches) == MAX_STRETCHES:
            self.num_dropped += 1
            return
        self.stretches.append(Stretch(part, self._nanos() if at is None else at, details))

    def explain(self, details: Details) -> None:
        """Adds details to the present part."""
        if not self.num_dropped:
            self.stretches[-1].details = details

    def end(self, outcome: str = "") -> None:
        """Ends the present part. Idempotent: the first end counts."""
        if self.ended is None:
            self.stretches[-1].outcome = outcome
            self.ended = self._nanos()

    def nanos_of(self, *parts: Part) -> int:
        """The time of some parts, up to the end or, before it, up to now."""
        ends = [*(stretch.began for stretch in self.stretches[1:]), self.ended or self._nanos()]
        pairs = zip(self.stretches, ends, strict=True)
        return sum(end - stretch.began for stretch, end in pairs if stretch.part in parts)
