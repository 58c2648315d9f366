"""What a phase of a request's time consists of: waits with their reasons, and chunks of a prefill.

Times are nanoseconds since the epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.telemetry.time_parts import TimePart, part_of_reason

MAX_WAITS = 16
"""Waits of a phase. Beyond them, neighbours are merged."""
MAX_CHUNKS = 32
"""Chunks of a phase. Beyond twice this number, neighbours are merged."""


class ReasonStart(NamedTuple):
    """From when on a request waited for a reason, until the next one."""

    start: int
    reason: str
    step: int | None = None
    """The first step that the reason kept it out of; None without a step."""
    holder: str = ""
    """Id of the request that had most of what this one lacked; empty if none had."""


@dataclass(slots=True)
class Wait:
    """A part of a phase in which a request waits."""

    start: int
    end: int
    reasons: dict[str, int]
    """Nanoseconds by reason; several after merging."""
    step: int | None = None
    holder: str = ""
    """Both as in ReasonStart; after merging, of the longest wait."""

    @property
    def reason(self) -> str:
        """The reason of most of it."""
        return max(self.reasons, key=self.reasons.__getitem__)

    def merge(self, later: "Wait") -> None:
        """Adds a wait that follows this one."""
        if later.end - later.start > self.end - self.start:
            self.step, self.holder = later.step, later.holder
        self.end = later.end
        for reason, nanos in later.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + nanos

    def time_parts(self) -> list[TimePart]:
        """A part for each reason; what was waited for is known of the longest."""
        longest = self.reason
        return [
            TimePart(part_of_reason(reason), nanos, self.holder, self.step)
            if reason == longest
            else TimePart(part_of_reason(reason), nanos)
            for reason, nanos in self.reasons.items()
        ]


@dataclass(slots=True)
class Chunk:
    """Tokens of a request in its prefill that a step computed, or several steps after merging."""

    start: int
    end: int
    first_step: int
    last_step: int
    num_steps: int
    num_tokens: int
    num_step_tokens: int
    """Tokens of all requests of the step."""
    num_requests: int
    """Requests in the step."""
    compute_nanos: int
    """Time in which the workers computed the whole step."""
    wait_nanos: int = 0
    """Time of the waits that were merged into it."""

    def merge(self, later: "Chunk | Wait") -> None:
        """Adds a part that follows this one."""
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
    """MAX_WAITS at most: each of those given is merged into the first one of its group."""
    size = max(1, -(-len(waits) // MAX_WAITS))
    for begin in range(0, len(waits), size):
        for later in waits[begin + 1 : begin + size]:
            waits[begin].merge(later)
    return waits[::size]


def merged_chunks(parts: Sequence[Wait | Chunk]) -> list[Wait | Chunk]:
    """Half as many chunks; the waits between two that become one are part of it."""
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
