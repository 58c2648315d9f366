"""The journal in which gateways share answers of requests with a key: a log and a lease each."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a log. Each owner of a log has a fence, above those of all owners before; it
    numbers its entries from 0. Once an entry with a higher fence is there, none with a lower one
    can be appended.
    """

    fence: int = 0
    number: int = 0

    @property
    def next(self) -> "Position":
        return Position(self.fence, self.number + 1)

    @property
    def next_fence(self) -> "Position":
        return Position(self.fence + 1, 0)


@dataclass(frozen=True, slots=True)
class Append:
    """An entry to append at a position, which must be above all that are there."""

    scope: str
    position: Position
    value: bytes
    begins: bool = False
    """Whether the log may be missing; it is made then."""
    keeps_lease: bool = True
    """Whether the lease is renewed; else it is given back."""


class Appended(enum.Enum):
    """The outcome of an Append."""

    DONE = "done"
    FENCED = "fenced"
    """The log has an entry at that position, or after it, by another owner."""
    LOST = "lost"
    """There is no log any more."""


@dataclass(frozen=True, slots=True)
class News:
    """The entries of a log, or those after a position, and whether the lease is taken."""

    entries: Sequence[tuple[Position, bytes]]
    is_leased: bool


class Journal(Protocol):
    """Logs by the scope of their key. Each is forgotten some time after its last entry.

    Every call raises Unavailable if it cannot be done in time; whether it was done is not known
    then. An append that is repeated word for word is done once.
    """

    async def ping(self) -> None:
        """Returns if calls may succeed."""

    async def open(self, scope: str) -> tuple[bool, News]:
        """Takes the lease of a log unless it is taken, and reads the log, which need not be
        there. Returns whether it was taken, and all entries.
        """

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Appends one entry to each of several logs, together with their leases."""

    async def read(self, places: Sequence[tuple[str, Position]]) -> list[News]:
        """The entries of each log after a position."""

    async def release(self, scope: str) -> None:
        """Gives a lease back."""

    async def forget(self, scopes: Sequence[str]) -> None:
        """Removes logs and leases."""

    async def close(self) -> None:
        """Releases the connection. No other call follows."""
