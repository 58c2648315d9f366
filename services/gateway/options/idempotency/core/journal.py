"""The journal through which gateways share answers with an idempotency key. Each answer has a log,
and a lease: the right of one gateway to generate the answer.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of an entry in a log. Each gateway that becomes the owner of the log gets a
    fence: a number above the fences of all earlier owners. An owner numbers its entries from 0.
    After an entry, no entry with a lower fence can be appended.
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
    """An entry to append to a log. Its position must be above all positions in the log."""

    scope: str
    position: Position
    value: bytes
    begins: bool = False
    """Whether the log is created if it does not exist."""
    keeps_lease: bool = True
    """Whether the log's lease is renewed. If false, the lease is released."""


class Appended(enum.Enum):
    DONE = "done"
    FENCED = "fenced"
    """The log has an entry of another owner at or after the entry's position."""
    LOST = "lost"
    """The log does not exist any more."""


@dataclass(frozen=True, slots=True)
class News:
    """All entries of a log, or all entries after a position, and whether any gateway has the log's
    lease.
    """

    entries: Sequence[tuple[Position, bytes]]
    is_leased: bool


class Journal(Protocol):
    """Stores logs. A log is identified by the scope of its idempotency key, and expires some time
    after its last entry.

    Every call raises Unavailable if it is not completed in time. The call may have had its effect
    nevertheless, so it can be repeated: an identical append takes effect only once.
    """

    async def ping(self) -> None:
        """Checks whether the journal is reachable."""

    async def open(self, scope: str) -> tuple[bool, News]:
        """Acquires the lease of a log if no gateway has it, and reads the log, which may be
        missing. Returns whether the lease was acquired, and all entries of the log.
        """

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        """Appends one entry to each of several logs, and renews or releases the lease of each log
        whose outcome is DONE. Each append is atomic.
        """

    async def read(self, places: Sequence[tuple[str, Position]]) -> list[News]:
        """Reads several logs. `places` has the scope of each log, and the position after which
        entries are returned.
        """

    async def release(self, scope: str) -> None:
        """Releases a lease."""

    async def forget(self, scopes: Sequence[str]) -> None:
        """Removes logs and leases."""

    async def close(self) -> None: ...
