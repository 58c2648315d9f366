"""Writes the logs of all answers that this gateway generates."""

import asyncio
import logging
from collections.abc import Callable

from services.gateway.core.ports import Clock
from services.gateway.options.idempotency.core.counts import SharingCounts
from services.gateway.options.idempotency.core.entries import Take, entry_to_bytes
from services.gateway.options.idempotency.core.journal import Append, Appended, Journal, Position
from services.gateway.options.idempotency.core.keyed_request import KeyedRequest
from services.gateway.options.idempotency.core.log_view import LogView
from services.gateway.options.idempotency.core.owned_log import OwnedLog, start_entry

logger = logging.getLogger(__name__)

_APPENDS_AT_A_TIME = 128


class OwnedLogs:
    """Writes logs to a journal, the store from which other gateways read them. Each log is written
    until its answer has ended, or until another gateway takes over the log.

    `on_news` is called when there may be entries to write. `fenced` is called with a request whose
    log another gateway took over. The lease of each log, the right to write it, is renewed every
    `heartbeat_seconds`.
    """

    def __init__(
        self,
        journal: Journal,
        gateway: str,
        clock: Clock,
        counts: SharingCounts,
        heartbeat_seconds: float,
        on_news: Callable[[], None],
        fenced: Callable[[KeyedRequest], None],
    ) -> None:
        """`gateway` is this gateway's unique name."""
        self._journal = journal
        self._take_entry = entry_to_bytes(Take(gateway))
        self._clock = clock
        self._counts = counts
        self._heartbeat_seconds = heartbeat_seconds
        self._on_news = on_news
        self._fenced = fenced
        self._logs: dict[str, OwnedLog] = {}
        self._writing = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, scope: str) -> bool:
        return scope in self._logs

    def log_of(self, request: KeyedRequest) -> OwnedLog | None:
        """Returns the log of this KeyedRequest object, or None if this gateway does not write
        it.
        """
        log = self._logs.get(request.scope)
        return log if log is not None and log.request is request else None

    async def claim(self, request: KeyedRequest, view: LogView) -> bool:
        """Appends an entry that makes this gateway the log's owner: a Begin if the log has no
        answer, and otherwise a Take. Returns whether the entry was appended.
        """
        position = view.position.next_fence
        entry = self._take_entry if view.has_answer else start_entry(request)
        append = Append(request.scope, position, entry, begins=not view.has_answer)
        (appended,) = await self._journal.append([append])
        if appended is not Appended.DONE:
            return False
        self._add(request, position, begins=False, has_recording=view.has_answer)
        return True

    def begin_later(self, request: KeyedRequest, written: Position) -> None:
        """Makes this gateway the owner of a log that is not in the journal. The next `write` writes
        the log's Begin entry.
        """
        self._add(request, written, begins=True, has_recording=False)

    def drop(self, request: KeyedRequest) -> None:
        log = self.log_of(request)
        if log is not None:
            self._remove(log)

    async def write(self) -> None:
        """Writes the due entries of all logs. Raises Unavailable if the journal is unavailable."""
        async with self._writing:
            now = self._clock.time()
            due = [
                (log, append)
                for log in self._logs.values()
                if (append := log.next(now)) is not None
            ]
            for start in range(0, len(due), _APPENDS_AT_A_TIME):
                part = due[start : start + _APPENDS_AT_A_TIME]
                outcomes = await self._journal.append([append for _, append in part])
                for (log, _), outcome in zip(part, outcomes, strict=True):
                    if self._logs.get(log.request.scope) is log:
                        self._written(log, outcome)

    def _written(self, log: OwnedLog, outcome: Appended) -> None:
        request = log.request
        match outcome:
            case Appended.DONE:
                self._counts.entries += 1
                request.owns_log = True
                log.done(self._clock.time())
                if log.is_done:
                    self._remove(log)
            case Appended.LOST:
                self._counts.lost += 1
                log.restart()
                self._on_news()
            case Appended.FENCED:
                self._counts.fenced += 1
                logger.warning(
                    "another gateway continues the answer to a request with an idempotency key"
                )
                request.owns_log = False
                self._remove(log)
                self._fenced(request)

    def _add(
        self, request: KeyedRequest, written: Position, *, begins: bool, has_recording: bool
    ) -> None:
        request.owns_log = not begins
        self._logs[request.scope] = OwnedLog(
            request,
            written,
            self._on_news,
            self._heartbeat_seconds,
            begins=begins,
            has_recording=has_recording,
        )
        self._on_news()

    def _remove(self, log: OwnedLog) -> None:
        del self._logs[log.request.scope]
        log.close()
