"""The parts of a phase in a request's timeline: waits and prefill chunks. Times are Unix
nanoseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.telemetry.time_parts import TimePart, part_of_reason

MAX_WAITS = 16
"""Limit on the number of waits in a phase. If there are more, neighbouring waits are merged."""
RETAINED = "retained"
"""The wait reason for which `holder` is a text and not the id of a request."""
MAX_CHUNKS = 32
"""If a phase has twice this number of parts, neighbouring chunks of the phase are merged."""


class ReasonStart(NamedTuple):
    """The time from which on a request waits for a reason, until the next ReasonStart."""

    start: int
    reason: str
    step: int | None = None
    """Number of the first step that did not admit the request for this reason, or None."""
    holder: str = ""
    """Id of the request that held most of the blocks or rows that were missing. Empty if none did.
    For the reason RETAINED, a text that explains which KV blocks of an ended request were kept.
    """


@dataclass(slots=True)
class Wait:
    """A part of a phase in which the request waits for one or (after a merge) several reasons."""

    start: int
    end: int
    reasons: dict[str, int]
    """Maps each reason to the nanoseconds for which the request waited for it."""
    step: int | None = None
    holder: str = ""
    """See `ReasonStart`. After a merge, `step` and `holder` are those of the longest wait."""

    @property
    def reason(self) -> str:
        """The reason for which the request waited longest."""
        return max(self.reasons, key=self.reasons.__getitem__)

    def merge(self, later: "Wait") -> None:
        if later.end - later.start > self.end - self.start:
            self.step, self.holder = later.step, later.holder
        self.end = later.end
        for reason, nanos in later.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + nanos

    def time_parts(self) -> list[TimePart]:
        """One part for each reason. Only the longest part has `holder` and `step`."""
        longest = self.reason
        holder = "" if longest == RETAINED else self.holder
        return [
            TimePart(part_of_reason(reason), nanos, holder, self.step)
            if reason == longest
            else TimePart(part_of_reason(reason), nanos)
            for reason, nanos in self.reasons.items()
        ]


@dataclass(slots=True)
class Chunk:
    """The prefill of a request in one step or (after a merge) several steps."""

    start: int
    end: int
    first_step: int
    last_step: int
    num_steps: int
    num_tokens: int
    num_step_tokens: int
    """Number of tokens of all requests in the step, or in all merged steps together."""
    num_requests: int
    """Number of requests in the step, or the largest such number of the merged steps."""
    compute_nanos: int
    """Time in which the workers computed the step for all its requests."""
    wait_nanos: int = 0
    """Duration, in nanoseconds, of the waits that were merged into this chunk."""

    def merge(self, later: "Chunk | Wait") -> None:
        if isinstance(later, Wait):
            self.wait_nanos += later.end - later.start
        else:
            self.last_step = later.last_step
            self.num_steps += later.num_steps
            self.num_tokens += later.num_tokens
            self.num_step_tokens += later.num_step_tokens
            self.num_requests = max(self.num_requests, later.num_requests)
            self.compute_nanos += later.compute_nanos
            self.wait_nanos += later.wait_nanos
        self.end = later.end


def merged_waits(waits: list[Wait]) -> list[Wait]:
    """Merges neighbouring waits, so that at most MAX_WAITS remain."""
    size = max(1, -(-len(waits) // MAX_WAITS))
    for begin in range(0, len(waits), size):
        for later in waits[begin + 1 : begin + size]:
            waits[begin].merge(later)
    return waits[::size]


def merged_chunks(parts: Sequence[Wait | Chunk]) -> list[Wait | Chunk]:
    """Merges each pair of neighbouring chunks with the waits between them."""
    merged: list[Wait | Chunk] = []
    pending: list[Wait | Chunk] = []
    is_open = False
    for part in parts:
        if isinstance(part, Wait):
            pending.append(part)
        elif is_open and isinstance(merged[-1], Chunk):
            for waited in pending:
                merged[-1].merge(waited)
            merged[-1].merge(part)
            pending, is_open = [], False
        else:
            merged += [*pending, part]
            pending, is_open = [], True
    return merged + pending
