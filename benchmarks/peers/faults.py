"""Faults of a link between services: a message is lost, repeated, late, out of order or changed."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.peers.fields import change_names, changed, field_paths, present_paths
from benchmarks.peers.methods import Lane, decoded, message_type

LATE_SECONDS = 0.2
WHOLE_MESSAGE = (
    "dropped",
    "repeated",
    "late",
    "after the next",
    "cut",
    "emptied",
    "call broken",
)
"""Names of the faults that affect a whole message."""


class BrokenCallError(Exception):
    """Raised by a rule when the proxy must end the call."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one message of a lane. A lane is the messages of one method in one direction.

    If `path` is empty, the fault affects the whole message. Otherwise it affects the field at this
    path.
    """

    lane: Lane
    change: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = ".".join(self.path) or "message"
        return f"{self.lane}: {place}: {self.change}"


def faults_of(lane: Lane) -> Iterator[Fault]:
    """All faults of a lane: of its whole messages, and then of each field of its messages."""
    for change in WHOLE_MESSAGE:
        yield Fault(lane, change)
    kind = message_type(lane)
    if kind is not None:
        for path in field_paths(kind):
            for change in change_names(kind, path):
                yield Fault(lane, change, path)


class Clean:
    """A rule that forwards messages unchanged."""

    async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:  # noqa: ARG002
        return [message]


@dataclass(slots=True)
class Observed:
    """A rule that forwards messages unchanged, and records which fields are set in the messages of
    each lane (method and direction).
    """

    present: dict[Lane, set[tuple[str, ...]]] = field(default_factory=dict)

    async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:
        found = decoded(lane, message)
        paths = set() if found is None else present_paths(found)
        self.present.setdefault(lane, set()).update(paths)
        return [message]


class Injection:
    """A rule that injects a fault.

    The first `num_spared` messages to which the fault applies are forwarded unchanged. The fault is
    injected into the next one.
    """

    def __init__(self, fault: Fault, num_spared: int = 0) -> None:
        self.fault = fault
        self.has_happened = asyncio.Event()
        self._num_spared = num_spared
        self._held: bytes | None = None

    async def passed_on(self, lane: Lane, message: bytes) -> list[bytes]:
        if lane != self.fault.lane:
            return [message]
        if self._held is not None:
            held, self._held = self._held, None
            return [message, held]
        wrong = self._wrong(message) if not self.has_happened.is_set() else None
        if wrong is None:
            return [message]
        if self._num_spared:
            self._num_spared -= 1
            return [message]
        self.has_happened.set()
        if self.fault.change == "late":
            await asyncio.sleep(LATE_SECONDS)
        if self.fault.change == "call broken":
            raise BrokenCallError
        if self.fault.change == "after the next":
            self._held = message
        return wrong

    def _wrong(self, message: bytes) -> list[bytes] | None:
        """The messages sent in place of `message`, or None if the fault does not apply to it."""
        match None if self.fault.path else self.fault.change:
            case "dropped" | "after the next":
                return []
            case "repeated":
                return [message, message]
            case "late" | "call broken":
                return [message]
            case "cut":
                return [message[: len(message) // 2 or 1]] if len(message) > 1 else None
            case "emptied":
                return [b""]
        found = decoded(self.fault.lane, message)
        other = None if found is None else changed(found, self.fault.path, self.fault.change)
        return None if other is None else [other]
