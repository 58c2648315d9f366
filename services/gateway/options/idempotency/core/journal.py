"""The journal through which gateways share answers with a key. Each answer has a log and a
lease.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A position in a log. Each owner of a log has a fence, which is a number above the fences of
    all earlier owners. An owner numbers its entries from 0. Once the log has an entry with a higher
    fence, entries with a lower fence cannot be appended.
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
    """An entry to append at a position, which must be above the positions of all existing
    entries.
    """

    scope: str
    position: Position
    value: bytes
    begins: bool = False
    """Whether the log is created if it does not exist."""
    keeps_lease: bool = True
    """Whether the lease is renewed. Otherwise it is released."""


class Appended(enum.Enum):
    DONE = "done"
    FENCED = "fenced"
    """The log has an entry of another owner at or after the position of the Append."""
    LOST = "lost"
    """The log does not exist any more."""


@dataclass(frozen=True, slots=True)
class News:
    """Entries of a log, and whether a gateway has the lease. The entries are all entries of the
    log, or only those after a position.
    """

    entries: Sequence[tuple[Position, bytes]]
    is_leased: bool


class Journal(Protocol):
    """Stores logs. A log is identified by the scope of its key. A log expires some time after its
    last entry.

    Every call raises Unavailable if it cannot be completed in time. Such a call may still have
    taken effect. An identical append that is repeated takes effect once.
    """

    async def ping(self) -> None:
        """Returns if the journal is reachable."""

    async def open(self, scope: str) -> tuple[bool, News]:
        """Acquires the lease of a log if it is free, and reads the log, which may not exist.
        Returns whether the lease was acquired, and all entries.
        """

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Appends one entry to each of several logs, and renews or releases their leases."""

    async def read(self, places: Sequence[tuple[str, Position]]) -> list[News]:
        """Reads several logs. `places` has the scope of each log, and the position after which
        entries are returned.
        """

    async def release(self, scope: str) -> None:
        """Releases a lease."""

    async def forget(self, scopes: Sequence[str]) -> None:
        """Removes logs and leases."""

    async def close(self) -> None:
        """Closes the connection. No call may follow."""
