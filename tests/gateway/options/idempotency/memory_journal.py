"""The port Journal (logs of the answers to requests with idempotency keys) in memory, for several
gateways in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.errors import Unavailable
from services.gateway.options.idempotency.core.journal import Append, Appended, News, Position


@dataclass
class SharedLogs:
    """The logs, with their leases, that all journals of a test share."""

    time: Callable[[], float]
    lease_seconds: float = 3.0
    retention_seconds: float = 60.0
    logs: dict[str, list[tuple[Position, bytes]]] = field(default_factory=dict)
    log_ends: dict[str, float] = field(default_factory=dict)
    lease_ends: dict[str, float] = field(default_factory=dict)

    def log(self, scope: str) -> list[tuple[Position, bytes]] | None:
        if self.log_ends.get(scope, 0.0) <= self.time():
            self.logs.pop(scope, None)
        return self.logs.get(scope)

    def is_leased(self, scope: str) -> bool:
        return self.lease_ends.get(scope, 0.0) > self.time()

    def lease(self, scope: str) -> None:
        self.lease_ends[scope] = self.time() + self.lease_seconds


@dataclass
class MemoryJournal:
    """One gateway's access to the shared logs. Tests may change the attributes at any time."""

    shared: SharedLogs
    is_down: bool = False
    loses_answers: bool = False
    """Whether calls take effect but then raise Unavailable."""

    async def ping(self) -> None:
        self._check()

    async def open(self, scope: str) -> tuple[bool, News]:
        self._check()
        took_lease = not self.shared.is_leased(scope)
        if took_lease:
            self.shared.lease(scope)
        self._answer()
        return took_lease, News(list(self.shared.log(scope) or ()), is_leased=True)

    async def append(self, appends: Sequence[Append]) -> list[Appended]:
        self._check()
        outcomes = [self._append(append) for append in appends]
        self._answer()
        return outcomes

    async def read(self, places: Sequence[tuple[str, Position]]) -> list[News]:
        self._check()
        return [
            News(
                [entry for entry in self.shared.log(scope) or () if entry[0] > position],
                self.shared.is_leased(scope),
            )
            for scope, position in places
        ]

    async def release(self, scope: str) -> None:
        self._check()
        self.shared.lease_ends.pop(scope, None)

    async def forget(self, scopes: Sequence[str]) -> None:
        self._check()
        for scope in scopes:
            self.shared.logs.pop(scope, None)
            self.shared.lease_ends.pop(scope, None)

    async def close(self) -> None: ...

    def _append(self, append: Append) -> Appended:
        shared = self.shared
        log = shared.log(append.scope)
        if log is None:
            if not append.begins:
                return Appended.LOST
            log = shared.logs[append.scope] = []
        entry = (append.position, append.value)
        if not log or append.position > log[-1][0]:
            log.append(entry)
        elif log[-1] != entry:
            return Appended.FENCED
        shared.log_ends[append.scope] = shared.time() + shared.retention_seconds
        if append.keeps_lease:
            shared.lease(append.scope)
        else:
            shared.lease_ends.pop(append.scope, None)
        return Appended.DONE

    def _check(self) -> None:
        if self.is_down:
            raise Unavailable("the journal is down")

    def _answer(self) -> None:
        if self.loses_answers:
            raise Unavailable("the answer was lost")
