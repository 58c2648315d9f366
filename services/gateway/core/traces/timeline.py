"""Timelines: when each part of a request's processing began at the gateway. Each sequence of a
request (the prompt and one answer) has a timeline, too. When a traced request has ended, its
OpenTelemetry spans are made from the timelines.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.common.telemetry import names

MAX_STRETCHES = 64
"""Limit on the number of parts of a timeline. The timeline of a sequence that replicas refuse
repeatedly could otherwise have thousands of parts.
"""

Details = Mapping[str, str | int | float | bool]


class Part(enum.Enum):
    """A stage in the processing of a request or a sequence."""

    ADMIT = names.SPAN_GATEWAY_ADMIT
    """The gateway checks the API key, the caller's limits, and whether replicas have room."""
    READ = names.SPAN_GATEWAY_READ
    PARSE = names.SPAN_GATEWAY_PARSE
    TOKENIZE = names.SPAN_GATEWAY_TOKENIZE
    PREPARE = names.SPAN_GATEWAY_PREPARE
    """The gateway checks the parameters, and makes the sequences."""
    WAIT = names.SPAN_GATEWAY_WAIT
    """The request or sequence waits at the gateway. The part's details have the reason."""
    GENERATE = names.SPAN_GATEWAY_GENERATE
    """The replicas process the sequences, until the last sequence ends."""
    ROUTE = names.SPAN_GATEWAY_ROUTE
    """The gateway chooses a replica for a sequence."""
    ENGINE = names.SPAN_GATEWAY_ENGINE
    """A sequence is at a replica."""
    RESUBMIT = names.SPAN_GATEWAY_RESUBMIT
    """A sequence that left a replica before the sequence's end waits to be sent to a replica again.
    The part's details have the cause.
    """
    WRITE = names.SPAN_GATEWAY_WRITE
    """The gateway sends the last output to the client."""


@dataclass(slots=True)
class Stretch:
    """One part of a timeline, from `began` to the start of the next part."""

    part: Part
    began: int
    details: Details | None = None
    outcome: str = ""


class Timeline:
    """The consecutive parts of a request's or a sequence's processing. Each part starts at the end
    of the previous part. Times are in nanoseconds on the clock `nanos`.

    A timeline with MAX_STRETCHES parts gets no new parts. Its last part covers all further time.
    """

    __slots__ = ("_nanos", "ended", "num_dropped", "stretches")

    def __init__(self, nanos: Callable[[], int], part: Part, began: int | None = None) -> None:
        self._nanos = nanos
        self.stretches = [Stretch(part, nanos() if began is None else began)]
        self.ended: int | None = None
        self.num_dropped = 0

    @property
    def part(self) -> Part:
        """The current part, or the last part if the timeline has ended."""
        return self.stretches[-1].part

    @property
    def began(self) -> int:
        return self.stretches[0].began

    def now(self) -> int:
        return self._nanos()

    def enter(
        self, part: Part, details: Details | None = None, outcome: str = "", at: int | None = None
    ) -> None:
        """Ends the current part with an outcome, and starts `part` now, or at the earlier time `at`
        if it is given. Does nothing if the timeline has ended, or if part and details are
        unchanged.
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
        if not self.num_dropped:
            self.stretches[-1].details = details

    def end(self, outcome: str = "") -> None:
        """Ends the current part and the timeline. Idempotent."""
        if self.ended is None:
            self.stretches[-1].outcome = outcome
            self.ended = self._nanos()

    def nanos_of(self, *parts: Part) -> int:
        """Returns the total nanoseconds of the given parts up to the timeline's end, or up to now
        if the timeline has not ended.
        """
        ends = [*(stretch.began for stretch in self.stretches[1:]), self.ended or self._nanos()]
        pairs = zip(self.stretches, ends, strict=True)
        return sum(end - stretch.began for stretch, end in pairs if stretch.part in parts)
