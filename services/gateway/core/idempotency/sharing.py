"""Shares answers with other gateways through a journal, of which each may stop at any time.

1. The gateway that gets the lease of a key's log makes the answer, and appends what comes to the
   log, all keys together, every `flush_seconds`. It renews the leases with that.
2. Another gateway with a client for that key follows the log. When the lease has ended it takes it,
   appends an entry with the next fence, and goes on from what the log has: with the request's name,
   seed and tokens so far the rest is the same.
3. The owner that was only slow finds that it is fenced at its next entry. It writes no more, and
   goes on for the clients that it has; their tokens are the same.
4. Without the journal an answer is this gateway's own. It is written as soon as the journal is
   back. No token waits for the journal; the beginning of a request with a key does, `open_seconds`
   at most, and not at all while the journal is known to be away.

Fencing by the position in the log is that of Apache BookKeeper and Kafka's producer epochs.
"""

import asyncio
import enum
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import Unavailable
from services.gateway.core.idempotency.counts import SharingCounts
from services.gateway.core.idempotency.entries import DamagedEntry
from services.gateway.core.idempotency.journal import Journal, News, Position
from services.gateway.core.idempotency.key import KeyReused
from services.gateway.core.idempotency.keyed_request import KeyedRequest
from services.gateway.core.idempotency.log_view import LogView
from services.gateway.core.idempotency.owned_logs import OwnedLogs
from services.gateway.core.ports import Clock

logger = logging.getLogger(__name__)

_FORGOTTEN_AT_A_TIME = 128
_READS_AT_A_TIME = 128
_LAST_WRITES = 3
"""The beginning of a log, an entry that was not answered, and all that came since."""


class Role(enum.Enum):
    """The part that a gateway has in the answer of a key."""

    BEGINS = "begins"
    RESUMES = "resumes"
    FOLLOWS = "follows"
    HAS_ALL = "has_all"


@dataclass(frozen=True, slots=True)
class SharingTimes:
    """Times of the sharing, in seconds."""

    flush_seconds: float = 0.05
    """Time between two writes, and two reads, of the logs."""
    lease_seconds: float = 3.0
    """How long a lease holds; it is renewed three times as often."""
    open_seconds: float = 1.0
    """How long a request may wait for the journal."""
    again_seconds: float = 0.02
    """Time between two reads of a log that a gateway is about to begin."""
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 1.0


class SharingListener(Protocol):
    """Events of answers that other gateways cause."""

    def taken_over(self, request: KeyedRequest) -> None:
        """The answer is to be made here from now on."""

    def fenced(self, request: KeyedRequest) -> None:
        """Another gateway makes the answer, too."""

    def followed_to_end(self, request: KeyedRequest) -> None:
        """The answer came to its end at another gateway, or failed there."""


class Sharing:
    """The logs that this gateway writes and follows."""

    def __init__(
        self, journal: Journal, gateway: str, clock: Clock, times: SharingTimes | None = None
    ) -> None:
        """`gateway` is the name of this one, which no other has."""
        self.counts = SharingCounts()
        self.listener: SharingListener | None = None
        self.is_reachable = True
        """Whether the last call was done; at first it is taken for granted."""
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

    # What is asked of it.

    async def open(self, request: KeyedRequest) -> Role:
        """Finds out which gateway makes an answer that this one neither makes nor follows, and
        takes over what is there of it. Raises KeyReused if the key belongs to another request.
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
                    # Of a request that failed, which the log does not say yet.
                    await self._owned.write()
                while (role := await self._try_open(request)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(self._times.again_seconds)
                return role
        except TimeoutError:
            logger.warning("the log of a key was being opened by another gateway for too long")
        except Unavailable as error:
            self._failed(error)
        return self._begin_alone(request)

    def leave(self, request: KeyedRequest) -> None:
        """Stops writing or following the log of an answer. It can be opened again later."""
        self._unfollow(request)
        owned = self._owned.log_of(request)
        if owned is not None:
            owned.leave()

    def forget(self, request: KeyedRequest, *, everywhere: bool) -> None:
        """Forgets an answer here and, if `everywhere`, in the journal too, where this gateway was
        the last to write it.
        """
        self._unfollow(request)
        self._owned.drop(request)
        if everywhere and request.owns_log:
            self._forgotten.append(request.scope)
            self._awake.set()

    async def run(self) -> None:
        """Writes and reads until cancelled; closes the journal then."""
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
        """Writes what is left, once."""
        with suppress(Unavailable):
            for _ in range(_LAST_WRITES):
                await self._owned.write()

    # Opening a log.

    async def _try_open(self, request: KeyedRequest) -> Role | None:
        """One attempt; None if another gateway has the lease of a log that does not begin yet."""
        took_lease, news = await self._journal.open(request.scope)
        view = LogView()
        try:
            view.apply(news.entries)
        except DamagedEntry as error:
            await self._remove_damaged(request, error)
            return None
        if view.begin is None or not view.has_answer:
            if took_lease and await self._owned.begin(request, view):
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
        return Role.RESUMES if await self._owned.take(request, view) else None

    def _begin_alone(self, request: KeyedRequest) -> Role:
        """Without the journal; the log is written when that is back, unless another gateway has
        begun one.
        """
        self.counts.alone += 1
        self._owned.begin_later(request, Position())
        return _begins_or_resumes(request)

    async def _remove_damaged(self, request: KeyedRequest, error: DamagedEntry) -> None:
        logger.warning("the log of a key is removed: %s", error)
        self.counts.damaged += 1
        await self._journal.forget([request.scope])

    # What is done all the time.

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
            logger.info("answers of requests with a key are shared again")
        self.is_reachable = self._was_reached = True

    def _failed(self, error: Unavailable) -> None:
        self.counts.failures += 1
        if self.is_reachable:
            logger.warning("answers of requests with a key stay at this gateway: %s", error)
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
            if not (goes_on and await self._owned.take(request, view)):
                return
        else:  # the log is gone
            self._owned.begin_later(request, view.position)
        self._unfollow(request)
        self._tell.taken_over(request)

    def _is_following(self, request: KeyedRequest, view: LogView) -> bool:
        return self._followed.get(request.scope) == (request, view)

    def _unfollow(self, request: KeyedRequest) -> None:
        """Follows the log of an answer no further. Idempotent."""
        if self._followed.get(request.scope, (None,))[0] is request:
            del self._followed[request.scope]

    def _follow(
        self, request: KeyedRequest, view: LogView, entries: Sequence[tuple[Position, bytes]]
    ) -> bool:
        """Applies further entries; returns whether more are to come."""
        try:
            view.apply(entries)
        except DamagedEntry as error:
            logger.warning("a log is not followed any further: %s", error)
            self.counts.damaged += 1
            self._make_alone(request)
            return False
        if view.recording is not request.recording:
            self._make_alone(request)  # the key was forgotten, and another request began under it
            return False
        if request.recording.is_over:
            self._unfollow(request)
            self._tell.followed_to_end(request)
            return False
        return True

    def _make_alone(self, request: KeyedRequest) -> None:
        """Has an answer made here that was followed, without its log."""
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
    """The part of a gateway that generates an answer of which the journal has nothing."""
    return Role.RESUMES if request.recording.num_tokens else Role.BEGINS
