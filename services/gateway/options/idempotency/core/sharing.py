"""Shares answers to requests with an idempotency key between gateways, through a journal. The
journal has a log and a lease for each key. Each gateway, and the journal, may fail at any time.

1. The gateway that acquires the lease of a key's log owns the log and generates the answer. Every
   `flush_seconds`, the owner appends new output to the log, and renews the lease.
2. Another gateway that has a request with the key follows the log: reads the output from it. When
   the lease has expired, this second gateway acquires the lease, appends an entry with the next
   fence (the number of a log's owner), and continues the answer after the output in the log. The
   remaining output is as it would have been at the former owner, because request id, seed and the
   tokens so far are unchanged.
3. If the former owner was only slow, it is fenced: its next append fails. The former owner then
   stops writing, but continues to generate for its own clients, which get the same tokens.
4. While the journal is unavailable, answers are not shared. Their logs are written when the journal
   is available again. Output never waits for the journal. Only the start of a request with a key
   waits, for at most `open_seconds`, and not at all if the journal is known to be unavailable.

Fencing by the position in the log is as in Apache BookKeeper, and in Kafka's producer epochs.
"""

import asyncio
import enum
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import Unavailable
from services.gateway.core.ports import Clock
from services.gateway.options.idempotency.core.counts import SharingCounts
from services.gateway.options.idempotency.core.entries import DamagedEntry
from services.gateway.options.idempotency.core.journal import Journal, News, Position
from services.gateway.options.idempotency.core.key import KeyReused
from services.gateway.options.idempotency.core.keyed_request import KeyedRequest
from services.gateway.options.idempotency.core.log_view import LogView
from services.gateway.options.idempotency.core.owned_logs import OwnedLogs

logger = logging.getLogger(__name__)

_FORGOTTEN_AT_A_TIME = 128
_READS_AT_A_TIME = 128
_LAST_WRITES = 3
"""Number of writes to each log at shutdown: the Begin entry, an entry whose write may have failed,
and the remaining output.
"""


class Role(enum.Enum):
    """How a gateway gets the answer to a key: it begins or resumes the answer, follows the log of
    another gateway, or has read the whole answer from the log.
    """

    BEGINS = "begins"
    RESUMES = "resumes"
    FOLLOWS = "follows"
    HAS_ALL = "has_all"


@dataclass(frozen=True, slots=True)
class SharingTimes:
    """Times in seconds."""

    flush_seconds: float = 0.05
    """The interval between two writes of the owned logs, and two reads of the followed logs."""
    lease_seconds: float = 3.0
    """The duration of a lease. A lease is renewed after a third of this time."""
    open_seconds: float = 1.0
    """The time limit for the wait of a request for the journal."""
    again_seconds: float = 0.02
    """The interval between two attempts to open a log whose first entry is not written yet."""
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 1.0


class SharingListener(Protocol):
    """Receives events that other gateways cause."""

    def taken_over(self, request: KeyedRequest) -> None:
        """This gateway must generate the answer, which it has followed so far."""

    def fenced(self, request: KeyedRequest) -> None:
        """Another gateway has taken over the log of an answer that this gateway generates."""

    def followed_to_end(self, request: KeyedRequest) -> None:
        """The answer, which this gateway has followed, has ended or failed."""


class Sharing:
    """Writes the logs that this gateway owns, and reads the logs that it follows."""

    def __init__(
        self, journal: Journal, gateway: str, clock: Clock, times: SharingTimes | None = None
    ) -> None:
        """`gateway` is this gateway's unique name."""
        self.counts = SharingCounts()
        self.listener: SharingListener | None = None
        self.is_reachable = True
        """Whether the last call to the journal succeeded. It is true before the first call."""
        self._was_reached = False
        self._journal = journal
        self._clock = clock
        self._times = times or SharingTimes()
        self._followed: dict[str, tuple[KeyedRequest, LogView]] = {}
        self._forgotten: list[str] = []
        self._contact_at = clock.time()
        self._awake = asyncio.Event()
        self._owned = OwnedLogs(
            journal,
            gateway,
            clock,
            self.counts,
            self._times.lease_seconds / 3,
            self._awake.set,
            self._fenced,
        )

    # Calls from KeyedRequests.

    async def open(self, request: KeyedRequest) -> Role:
        """Determines which gateway generates an answer, and reads the output so far from the log.
        Must not be called for an answer that this gateway generates or follows. Raises KeyReused if
        an earlier request with the key has different content.
        """
        owned = self._owned.log_of(request)
        if owned is not None:
            owned.stay()
            return Role.RESUMES
        if not self.is_reachable:
            return self._begin_alone(request)
        try:
            async with asyncio.timeout(self._times.open_seconds):
                if request.scope in self._owned:
                    # Writes the failure of an earlier request with this key to the log first.
                    await self._owned.write()
                while (role := await self._try_open(request)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(self._times.again_seconds)
                return role
        except TimeoutError:
            logger.warning(
                "an answer with an idempotency key is not shared, since another gateway did not "
                "finish opening its log in Redis within the time limit"
            )
        except Unavailable as error:
            self._failed(error)
        return self._begin_alone(request)

    def leave(self, request: KeyedRequest) -> None:
        """Stops writing or following an answer's log. `open` may be called again later."""
        self._unfollow(request)
        owned = self._owned.log_of(request)
        if owned is not None:
            owned.leave()

    def forget(self, request: KeyedRequest, *, everywhere: bool) -> None:
        """Stops writing or following the log of a removed answer. If `everywhere` is true, and this
        gateway wrote the log's last entry, also removes the log from the journal.
        """
        self._unfollow(request)
        self._owned.drop(request)
        if everywhere and request.owns_log:
            self._forgotten.append(request.scope)
            self._awake.set()

    async def run(self) -> None:
        """Writes and reads logs until cancelled, then closes the journal."""
        times = self._times
        backoff = times.first_backoff_seconds
        try:
            while True:
                await self._something_to_do()
                try:
                    await self._turn()
                    backoff = times.first_backoff_seconds
                    await asyncio.sleep(times.flush_seconds)
                except Unavailable as error:
                    self._failed(error)
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, times.max_backoff_seconds)
        finally:
            await self._journal.close()

    async def finish(self) -> None:
        """Writes the remaining entries of all owned logs. Called at shutdown."""
        with suppress(Unavailable):
            for _ in range(_LAST_WRITES):
                await self._owned.write()

    # Opening of logs.

    async def _try_open(self, request: KeyedRequest) -> Role | None:
        """Tries to open a log. Returns None if the caller must try again, for example because
        another gateway has the lease, but has not written the log's Begin entry yet.
        """
        took_lease, news = await self._journal.open(request.scope)
        view = LogView()
        try:
            view.apply(news.entries)
        except DamagedEntry as error:
            await self._remove_damaged(request, error)
            return None
        if view.begin is None or not view.has_answer:
            if took_lease and await self._owned.claim(request, view):
                return _begins_or_resumes(request)
            return None
        if view.begin.fingerprint != request.fingerprint:
            if took_lease:
                await self._journal.release(request.scope)
            raise KeyReused
        request.adopt(view.begin.identity, view.recording)
        request.owns_log = False
        if view.recording.is_complete:
            if took_lease:
                await self._journal.release(request.scope)
            return Role.HAS_ALL
        if not took_lease:
            self._followed[request.scope] = request, view
            self._awake.set()
            return Role.FOLLOWS
        return Role.RESUMES if await self._owned.claim(request, view) else None

    def _begin_alone(self, request: KeyedRequest) -> Role:
        """Starts or resumes an answer without the journal. When the journal is available again, the
        answer's log is written, unless another gateway has started the log.
        """
        self.counts.alone += 1
        self._owned.begin_later(request, Position())
        return _begins_or_resumes(request)

    async def _remove_damaged(self, request: KeyedRequest, error: DamagedEntry) -> None:
        logger.warning(
            "the log in Redis of an answer with an idempotency key is damaged and removed: %s",
            error,
        )
        self.counts.damaged += 1
        await self._journal.forget([request.scope])

    # The periodic work.

    async def _something_to_do(self) -> None:
        if self._followed or not (self.is_reachable and self._was_reached):
            return
        seconds = self._times.lease_seconds / 3 if self._owned else None
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._awake.wait()
        self._awake.clear()

    async def _turn(self) -> None:
        if not (self.is_reachable and self._was_reached):
            await self._journal.ping()
        await self._owned.write()
        await self._read()
        forgotten = self._forgotten[:_FORGOTTEN_AT_A_TIME]
        if forgotten:
            await self._journal.forget(forgotten)
            del self._forgotten[: len(forgotten)]
        self._contact_at = self._clock.time()
        if not self.is_reachable:
            logger.info("answers with an idempotency key are shared with other gateways again")
        self.is_reachable = self._was_reached = True

    def _failed(self, error: Unavailable) -> None:
        self.counts.failures += 1
        if self.is_reachable:
            logger.warning(
                "answers with an idempotency key are not shared with other gateways: %s", error
            )
        self.is_reachable = False
        if self._clock.time() >= self._contact_at + self._times.lease_seconds:
            for request, _ in list(self._followed.values()):
                self._make_alone(request)

    async def _read(self) -> None:
        followed = list(self._followed.values())
        for start in range(0, len(followed), _READS_AT_A_TIME):
            part = followed[start : start + _READS_AT_A_TIME]
            positions = [(request.scope, view.position) for request, view in part]
            for (request, view), news in zip(
                part, await self._journal.read(positions), strict=True
            ):
                if self._is_following(request, view):
                    await self._apply_news(request, view, news)

    async def _apply_news(self, request: KeyedRequest, view: LogView, news: News) -> None:
        if not self._follow(request, view, news.entries) or news.entries or news.is_leased:
            return
        took_lease, all_news = await self._journal.open(request.scope)
        if not took_lease or not self._is_following(request, view):
            return
        if all_news.entries:
            goes_on = self._follow(request, view, all_news.entries)
            if not (goes_on and await self._owned.claim(request, view)):
                return
        else:  # The log has disappeared from the journal.
            self._owned.begin_later(request, view.position)
        self._unfollow(request)
        self._tell.taken_over(request)

    def _is_following(self, request: KeyedRequest, view: LogView) -> bool:
        return self._followed.get(request.scope) == (request, view)

    def _unfollow(self, request: KeyedRequest) -> None:
        if self._followed.get(request.scope, (None,))[0] is request:
            del self._followed[request.scope]

    def _follow(
        self, request: KeyedRequest, view: LogView, entries: Sequence[tuple[Position, bytes]]
    ) -> bool:
        """Applies new entries of a followed log. Returns whether this gateway still follows it."""
        try:
            view.apply(entries)
        except DamagedEntry as error:
            logger.warning(
                "the log of another gateway's answer with an idempotency key is damaged: %s", error
            )
            self.counts.damaged += 1
            self._make_alone(request)
            return False
        if view.recording is not request.recording:
            self._make_alone(request)  # The log now has the answer to another request.
            return False
        if request.recording.is_over:
            self._unfollow(request)
            self._tell.followed_to_end(request)
            return False
        return True

    def _make_alone(self, request: KeyedRequest) -> None:
        """Makes this gateway generate an answer that it has followed, without writing its log."""
        self.counts.alone += 1
        self._unfollow(request)
        self._tell.taken_over(request)

    def _fenced(self, request: KeyedRequest) -> None:
        self._tell.fenced(request)

    @property
    def _tell(self) -> SharingListener:
        assert self.listener is not None
        return self.listener


def _begins_or_resumes(request: KeyedRequest) -> Role:
    return Role.RESUMES if request.recording.num_tokens else Role.BEGINS
