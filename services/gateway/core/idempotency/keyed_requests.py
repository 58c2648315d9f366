"""The requests with an idempotency key that a gateway remembers, bounded in number and time."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.common.errors import InternalError, StepwellError
from services.gateway.core.idempotency.counts import KeyCounts
from services.gateway.core.idempotency.fingerprint import fingerprint
from services.gateway.core.idempotency.key import IdempotencyKey, KeyReused
from services.gateway.core.idempotency.keyed_request import KeyedRequest, Wanted
from services.gateway.core.idempotency.maker import make
from services.gateway.core.idempotency.sharing import Role, Sharing
from services.gateway.core.ports import Clock, ResumingEngine
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity

logger = logging.getLogger(__name__)

_FIRST_READER_SECONDS = 5.0
"""How long an answer is made before its first reader comes, which takes no time, unless its client
went away in that moment.
"""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Bounds of remembered answers. One is `detached` while it is generated without a client."""

    linger_seconds: float
    """How long an answer goes on without a client."""
    max_detached: int
    """Answers that do so at once; the one whose client left first is stopped for a further one."""
    retention_seconds: float
    """How long an answer is remembered after it ended, or stopped."""
    max_answers: int
    max_bytes: int
    """Bytes of answers that ended or stopped; the least recently used are forgotten first."""


class KeyedRequests:
    """Answers by the scope of their key.

    1. The first request under a key begins the answer. Requests with the same key and content read
       it from its beginning; others are refused.
    2. Once its last reader has gone, the answer goes on for `linger_seconds`, and stops then. One
       that stopped goes on, from where it is, when a request asks for it.
    3. An answer that ended is remembered, unless it ended with an error: the next request begins it
       anew.

    With `sharing` the same holds for all gateways together.
    """

    def __init__(
        self,
        engine: ResumingEngine,
        clock: Clock,
        limits: KeyLimits,
        sharing: Sharing | None = None,
    ) -> None:
        self.counts = KeyCounts()
        self.sharing = sharing
        self.num_bytes = 0
        """Bytes of the answers that ended or stopped."""
        self._engine = engine
        self._clock = clock
        self._limits = limits
        self._table: dict[str, KeyedRequest] = {}
        self._detached: dict[KeyedRequest, None] = {}
        if sharing is not None:
            sharing.listener = self

    def __len__(self) -> int:
        """How many answers there are, whole or in the making."""
        return len(self._table)

    def knows(self, key: IdempotencyKey) -> bool:
        """Whether this gateway has the answer, whole or in the making, so that no engine has to
        begin one.
        """
        request = self._table.get(key.scope(self._engine.model_fingerprint()))
        return request is not None and not request.is_idle

    async def attach(
        self,
        generation: Generation,
        key: IdempotencyKey,
        api: str,
        again: Callable[[Generation, Identity], Generation],
    ) -> Generation:
        """A generation with the answer that belongs to the key: the given one if it is the first.
        `api` is the kind of answer, and `again` makes the same request under another identity.

        Raises KeyReused.
        """
        wanted = Wanted(
            key.scope(self._engine.model_fingerprint()),
            fingerprint(api, generation.request),
            len(generation.sequences),
            generation.identity,
            partial(again, generation),
        )
        request, is_replay = await self._claim(wanted)
        if request.identity != generation.identity:
            generation = again(generation, request.identity)
        generation.source = request
        generation.is_replay = is_replay
        return generation

    async def _claim(self, wanted: Wanted) -> tuple[KeyedRequest, bool]:
        """The answer under a key, which is being made or is complete, and whether it was before."""
        while True:
            request = self._table.get(wanted.scope) or self._add(wanted)
            if request.fingerprint != wanted.fingerprint:
                self.counts.refused += 1
                raise KeyReused
            async with request.opening:
                if self._table.get(wanted.scope) is not request:
                    continue  # it failed, or was forgotten, meanwhile
                is_replay = True
                if request.is_idle:
                    is_replay = await self._open(request, wanted)
                else:
                    self.counts.attached += 1
                if not request.recording.is_complete:
                    request.build = request.build or wanted.build
                self._expect_reader(request)
                self._touch(request)
                return request, is_replay

    def _add(self, wanted: Wanted) -> KeyedRequest:
        request = self._table[wanted.scope] = KeyedRequest(wanted, self._reader_left)
        return request

    async def _open(self, request: KeyedRequest, wanted: Wanted) -> bool:
        """Begins to make an answer, or finds the gateway that does; returns whether there was one
        that makes it or made it.
        """
        request.build = wanted.build
        role = Role.RESUMES if request.recording.num_tokens else Role.BEGINS
        if self.sharing is not None:
            try:
                role = await self.sharing.open(request)
            except BaseException as error:
                if isinstance(error, KeyReused):
                    self.counts.refused += 1
                if not request.recording.num_tokens:
                    self._remove(request)
                raise
        match role:
            case Role.BEGINS:
                self.counts.begun += 1
                self._make(request)
            case Role.RESUMES:
                self.counts.resumed += 1
                self._make(request)
            case Role.FOLLOWS:
                self.counts.followed += 1
                request.is_followed = True
            case Role.HAS_ALL:
                self.counts.followed += 1
        return role in (Role.FOLLOWS, Role.HAS_ALL)

    # How an answer is made.

    def _make(self, request: KeyedRequest) -> None:
        assert request.build is not None
        generation = request.build(request.identity)
        request.maker = asyncio.create_task(self._run_maker(request, generation))

    async def _run_maker(self, request: KeyedRequest, generation: Generation) -> None:
        try:
            await make(self._engine, request, generation)
        except Exception:
            logger.exception("defect while an answer with a key was made")
            request.recording.fail(InternalError("a defect here"))
        request.maker = None
        self._end_making(request)

    def _stop(self, request: KeyedRequest) -> None:
        """Stops making the answer, which can go on later, here or at another gateway."""
        task, request.maker = request.maker, None
        if task is not None:
            task.cancel()
        if self.sharing is not None:
            self.sharing.leave(request)
        self._end_making(request)

    def _suspend(self, request: KeyedRequest) -> None:
        self.counts.suspended += 1
        self._stop(request)

    # What other gateways do: this is Sharing's listener.

    def taken_over(self, request: KeyedRequest) -> None:
        request.is_followed = False
        if request.readers and request.build is not None:
            self.counts.resumed += 1
            self._make(request)
        else:
            self._stop(request)

    def fenced(self, request: KeyedRequest) -> None:
        if request.maker is not None and not request.readers:
            self._suspend(request)

    def followed_to_end(self, request: KeyedRequest) -> None:
        request.is_followed = False
        self._end_making(request)

    # Its readers, and how long it is remembered.

    def _expect_reader(self, request: KeyedRequest) -> None:
        self._detached.pop(request, None)
        if not request.readers:
            self._at(_FIRST_READER_SECONDS, request, self._reader_left)

    def _reader_left(self, request: KeyedRequest) -> None:
        """Decides what becomes of an answer whose last reader has gone, or whose first has not
        come.
        """
        if request.readers:
            return
        if request.maker is not None:
            self._detached[request] = None
            self._at(self._limits.linger_seconds, request, self._suspend)
            while len(self._detached) > self._limits.max_detached:
                self._suspend(next(iter(self._detached)))
        elif request.is_followed:
            request.is_followed = False
            self._stop(request)
        else:
            self._end_making(request)

    def _end_making(self, request: KeyedRequest) -> None:
        """Notes that this gateway does not make the answer now: it has ended, or was stopped."""
        self._detached.pop(request, None)
        request.making_ended()
        if request.recording.error is not None:
            self._remove(request)
        if self._table.get(request.scope) is not request:
            return
        if request.recording.is_complete or not request.readers:
            request.build = None
        self.num_bytes += request.recording.num_bytes - request.num_bytes
        request.num_bytes = request.recording.num_bytes
        if not request.readers:
            self._at(self._limits.retention_seconds, request, self._expire)
        self._make_room()

    def _expire(self, request: KeyedRequest) -> None:
        if request.is_unused:
            self._remove(request)
            if self.sharing is not None:
                self.sharing.forget(request, everywhere=False)

    def _make_room(self) -> None:
        limits = self._limits
        while len(self._table) > limits.max_answers or self.num_bytes > limits.max_bytes:
            unused = next((one for one in self._table.values() if one.is_unused), None)
            if unused is None:
                return
            self.counts.evicted += 1
            self._remove(unused)
            if self.sharing is not None:
                self.sharing.forget(unused, everywhere=True)

    def _touch(self, request: KeyedRequest) -> None:
        """Puts an answer behind all others in the order in which they are forgotten."""
        self._table[request.scope] = self._table.pop(request.scope)
        self._make_room()

    def _remove(self, request: KeyedRequest) -> None:
        """Forgets an answer. Idempotent."""
        request.stop_timer()
        self._detached.pop(request, None)
        if self._table.get(request.scope) is request:
            del self._table[request.scope]
            self.num_bytes -= request.num_bytes
            request.num_bytes = 0

    def _at(
        self, seconds: float, request: KeyedRequest, call: Callable[[KeyedRequest], None]
    ) -> None:
        """Calls `call` with a request after a time, in place of the call that was set before."""
        request.stop_timer()
        request.timer = self._clock.call_at(self._clock.time() + seconds, partial(call, request))

    async def run(self) -> None:
        """Shares answers with other gateways until cancelled, where that is wanted."""
        if self.sharing is None:
            await asyncio.Event().wait()
        else:
            await self.sharing.run()

    async def close(self, error: StepwellError) -> None:
        """Ends all readers with an error, and makes nothing any further. Other gateways can go on
        from where answers are.
        """
        for request in list(self._table.values()):
            request.cut(error)
            if request.maker is not None:
                self._stop(request)
        if self.sharing is not None:
            await self.sharing.finish()
