"""A gateway's answers to requests with an idempotency key. The number of answers, their size and
their storage time are limited. The readers of an answer are the clients' requests for it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from services.common.errors import InternalError, StepwellError
from services.gateway.core.ports import Clock
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.identity import Identity
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import to_engine_requests
from services.gateway.options.idempotency.core.counts import KeyCounts
from services.gateway.options.idempotency.core.key import IdempotencyKey, KeyReused, fingerprint
from services.gateway.options.idempotency.core.keyed_request import KeyedRequest, Wanted
from services.gateway.options.idempotency.core.maker import ResumingEngine, make
from services.gateway.options.idempotency.core.sharing import Role, Sharing

logger = logging.getLogger(__name__)

_FIRST_READER_SECONDS = 5.0
"""The time in seconds within which the client must start to read its answer. Otherwise the answer
counts as detached (see KeyLimits).
"""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits on answers. An answer that is generated while no client reads it is called
    detached.
    """

    linger_seconds: float
    """The time in seconds after which the generation of a detached answer is stopped."""
    max_detached: int
    """Maximum number of detached answers. If there are more, the longest detached is stopped."""
    retention_seconds: float
    """The time in seconds for which an ended or stopped answer is stored."""
    max_answers: int
    max_bytes: int
    """The maximum total bytes of ended and stopped answers. When there are more, the least recently
    used answers are removed.
    """


class KeyedRequests:
    """Stores each answer under the scope of its key, an id that is made from the key.

    1. The first request with a key starts the answer. Later requests with the same key and the same
       content read this answer from its beginning. Requests with other content are refused.
    2. When an answer's last reader has left, the answer is generated for `linger_seconds` more, and
       is then stopped. The next request with the key resumes a stopped answer.
    3. An answer that has ended without an error is stored. After an error, the next request with
       the key starts a new answer.

    With `sharing`, these rules hold for all gateways together.
    """

    def __init__(
        self,
        inference: Inference,
        engine: ResumingEngine,
        clock: Clock,
        limits: KeyLimits,
        sharing: Sharing | None = None,
    ) -> None:
        self.counts = KeyCounts()
        self.sharing = sharing
        self.num_bytes = 0
        """The total bytes of ended and stopped answers."""
        self._inference = inference
        self._engine = engine
        self._clock = clock
        self._limits = limits
        self._table: dict[str, KeyedRequest] = {}
        self._detached: dict[KeyedRequest, None] = {}
        if sharing is not None:
            sharing.listener = self

    def __len__(self) -> int:
        return len(self._table)

    def knows(self, key: IdempotencyKey) -> bool:
        """Whether this gateway has the key's answer, complete or in progress. A request with this
        key then needs no room at a replica.
        """
        request = self._table.get(key.scope(self._engine.model_fingerprint()))
        return request is not None and not request.is_idle

    async def attach(self, generation: Generation, key: IdempotencyKey, api: str) -> Generation:
        """Returns a Generation (a request while it runs) that reads the key's answer. It is the
        given generation if the answer has the same identity, as for the first request with the key.
        `api` is the kind of answer, such as a chat completion. Raises KeyReused if an earlier
        request with the key has different content.
        """
        wanted = Wanted(
            key.scope(self._engine.model_fingerprint()),
            fingerprint(api, generation.request),
            len(generation.sequences),
            generation.identity,
            partial(self._again, generation),
        )
        request, is_replay = await self._claim(wanted)
        if request.identity != generation.identity:
            generation = self._again(generation, request.identity)
        generation.source = request
        generation.is_replay = is_replay
        generation.num_resumed_tokens = 0 if is_replay else request.recording.num_tokens
        return generation

    def _again(self, generation: Generation, identity: Identity) -> Generation:
        """Makes a new Generation of the request, with another identity (id, seed, arrival time). It
        has no deadline, because the answer may have clients with other deadlines. The lengths of
        its answers are those for which the request was checked, even if the limits have changed.
        """
        request = replace(generation.request, request_id=identity.request_id)
        sequences = to_engine_requests(
            request,
            self._inference.limits(),
            seed=identity.seed,
            arrival_unix_nanos=identity.arrival_unix_nanos,
            trace=generation.sequences[0].trace,
        )
        lengths = [checked.sampling.max_tokens for checked in generation.sequences]
        sequences = [
            replace(one, sampling=replace(one.sampling, max_tokens=length))
            for one, length in zip(sequences, lengths, strict=True)
        ]
        return Generation(request, identity, sequences, self._inference.tokenizer)

    async def _claim(self, wanted: Wanted) -> tuple[KeyedRequest, bool]:
        """Returns the key's answer, in progress or complete, and whether it existed before."""
        while True:
            request = self._table.get(wanted.scope) or self._add(wanted)
            if request.fingerprint != wanted.fingerprint:
                self.counts.refused += 1
                raise KeyReused
            async with request.opening:
                if self._table.get(wanted.scope) is not request:
                    continue  # The answer failed or was removed during the wait for the lock.
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
        """Starts or resumes an answer, or follows another gateway, which generates it, by reading
        the answer's log. Returns whether another gateway generates or has completed the answer.
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

    # Generation of answers.

    def _make(self, request: KeyedRequest) -> None:
        assert request.build is not None
        generation = request.build(request.identity)
        request.maker = asyncio.create_task(self._run_maker(request, generation))

    async def _run_maker(self, request: KeyedRequest, generation: Generation) -> None:
        try:
            await make(self._engine, request, generation)
        except Exception:
            logger.exception("a defect ended the answer of a request with an idempotency key")
            request.recording.fail(
                InternalError(
                    "the request failed because of a defect of the server; its log has the cause"
                )
            )
        request.maker = None
        self._end_making(request)

    def _stop(self, request: KeyedRequest) -> None:
        """Stops generating the answer. This or another gateway can resume it later."""
        task, request.maker = request.maker, None
        if task is not None:
            task.cancel()
        if self.sharing is not None:
            self.sharing.leave(request)
        self._end_making(request)

    def _suspend(self, request: KeyedRequest) -> None:
        self.counts.suspended += 1
        self._stop(request)

    # Events from other gateways. These methods implement SharingListener.

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

    # Readers and retention.

    def _expect_reader(self, request: KeyedRequest) -> None:
        self._detached.pop(request, None)
        if not request.readers:
            self._at(_FIRST_READER_SECONDS, request, self._reader_left)

    def _reader_left(self, request: KeyedRequest) -> None:
        """Called when the last reader has left, or the first reader has not connected in time."""
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
        """Called when an answer has ended or was stopped, and is no longer generated here."""
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
        self._table[request.scope] = self._table.pop(request.scope)
        self._make_room()

    def _remove(self, request: KeyedRequest) -> None:
        request.stop_timer()
        self._detached.pop(request, None)
        if self._table.get(request.scope) is request:
            del self._table[request.scope]
            self.num_bytes -= request.num_bytes
            request.num_bytes = 0

    def _at(
        self, seconds: float, request: KeyedRequest, call: Callable[[KeyedRequest], None]
    ) -> None:
        request.stop_timer()
        request.timer = self._clock.call_at(self._clock.time() + seconds, partial(call, request))

    async def run(self) -> None:
        """Shares answers with other gateways, if sharing is enabled, until cancelled."""
        if self.sharing is None:
            await asyncio.Event().wait()
        else:
            await self.sharing.run()

    async def close(self, error: StepwellError) -> None:
        """Ends all readers with an error, and stops the answers. Other gateways can resume them."""
        for request in list(self._table.values()):
            request.cut(error)
            if request.maker is not None:
                self._stop(request)
        if self.sharing is not None:
            await self.sharing.finish()
