"""Accepts the requests of all gateways and other clients of the scheduler."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import StepwellError, Unavailable
from services.common.pool.block_hash import BlockHash
from services.common.request.messages import adapter_from_proto
from services.common.request.prompt_embeds import PromptEmbeds
from services.scheduler.adapters.gateways.gateway_session import GatewaySession
from services.scheduler.adapters.gateways.request_intake import RequestIntake
from services.scheduler.adapters.gateways.resumable_sessions import ResumableSessions
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.workers.grammar_preparation import GrammarPreparation
from services.scheduler.core.engine.engine_core import EngineCore
from services.scheduler.core.request import Request

HASH_INLINE_TOKENS = 2048
"""Prompts with more tokens than this are hashed in a thread, so that hashing delays no step."""


@dataclass(eq=False)
class RequestSubmitter:
    """Checks requests, hashes their prompts, and adds them to the engine."""

    engine: EngineCore
    intake: RequestIntake
    sessions: Sessions
    client_sessions: ResumableSessions
    grammars: GrammarPreparation
    is_draining: bool = field(init=False, default=False)
    """Whether this process is stopping. A gateway's session then ends with its last request."""
    is_drained: bool = field(init=False, default=False)
    """Whether an operator has drained the replica, so that it refuses new requests."""
    _embeds: WeakValueDictionary[str, PromptEmbeds] = field(
        init=False, default_factory=WeakValueDictionary
    )
    """Maps cache salts to embedded prompts, which the answers of a request (`n`) share."""
    _hashed: tuple[str, bytes, list[int]] = field(init=False, default=("", b"", []))
    """Cache salt, adapter digest and tokens of the last long request that was hashed."""
    _hashes: list[BlockHash] = field(init=False, default_factory=list)
    """The hashes of that request, which the other answers of the same prompt share."""

    def drain(self) -> None:
        """Refuses new requests and further turns from now on."""
        self.is_draining = True
        self.client_sessions.end_all()
        self.sessions.wake()

    def refuse_new(self) -> None:
        """Refuses new requests and further turns until `is_drained` is set to False."""
        self.is_drained = True
        self.client_sessions.end_all()

    async def submit(self, session: GatewaySession, message: scheduler_pb2.AddRequest) -> None:
        """Queues a request of a gateway, or raises StepwellError to refuse it."""
        self._require_open()
        if not message.arrival_unix_nanos:
            message.arrival_unix_nanos = time.time_ns()
        request = self.intake.accept(message)
        if (embeds := request.prompt_embeds) is not None:  # may have many megabytes
            salt = await asyncio.to_thread(embeds.salted, message.cache_salt)
            request.cache_salt = salt
            request.prompt_embeds = self._embeds.setdefault(salt, embeds)
        if (retention := self.engine.scheduler.retention) is not None:
            retention.check(request)
        await self._hash(request)
        self._require_open()  # a drain may have begun meanwhile
        request.resumable = message.resumable and self.client_sessions.has_room
        self.sessions.own(session, message.handle, request)
        has_adapter = message.HasField("adapter")
        self.grammars.begin(request, adapter_from_proto(message.adapter) if has_adapter else None)
        self.engine.changes.add(request)

    async def submit_chunk(self, session: GatewaySession, message: scheduler_pb2.AddChunk) -> None:
        """Begins the next turn of a client's session (a request with several turns). If the input
        is refused, ends the session and raises StepwellError.
        """
        try:
            request = self.client_sessions.find(session, message)
            chunk = self.intake.accept_chunk(request, message)
        except StepwellError:
            self.client_sessions.end(session, message.handle)
            raise
        self.grammars.begin_turn(chunk)
        config = self.intake.config
        if config.enable_prefix_caching and len(chunk.token_ids) > HASH_INLINE_TOKENS:
            hashes = await asyncio.to_thread(
                request.hashes_with, config.fingerprint, config.hash_block_size, chunk.token_ids
            )
            chunk = replace(chunk, block_hashes=hashes)
        self.engine.changes.add_chunk(request, chunk)

    def _require_open(self) -> None:
        """Raises Unavailable if new requests are refused."""
        if self.is_draining or self.is_drained:
            raise Unavailable("the scheduler is draining", reason="DRAINING")

    async def _hash(self, request: Request) -> None:
        config = self.intake.config
        if not config.enable_prefix_caching or request.num_tokens <= HASH_INLINE_TOKENS:
            return
        hashed = request.cache_salt, request.adapter_digest, request.token_ids
        if hashed == self._hashed:
            request.block_hashes = self._hashes.copy()
        else:
            await asyncio.to_thread(
                request.hash_full_blocks, config.fingerprint, config.hash_block_size
            )
            self._hashed = request.cache_salt, request.adapter_digest, request.token_ids.copy()
            self._hashes = request.block_hashes.copy()
        request.hashed_unix_nanos = time.time_ns()
