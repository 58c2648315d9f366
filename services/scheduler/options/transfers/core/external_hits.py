"""External prefix hits: tokens of waiting requests whose keys and values a KV connector can load,
because it stores them outside the KV cache (in host memory or another replica).
"""

from itertools import islice
from typing import Protocol

from services.common.pool.kv_cache_groups import AttentionType, hit_block_size
from services.common.pool.operations import Admission, BlockTables, StopReason
from services.scheduler.core.output import WaitReason
from services.scheduler.core.planning.admission import AdmissionPlan, PassedOver
from services.scheduler.core.planning.replica_state import ReplicaState
from services.scheduler.core.planning.step_builder import StepBuilder
from services.scheduler.core.planning.transfers import Transfers
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.options.transfers.core.kv_connector import ExternalMatch
from services.scheduler.options.transfers.core.reserved_blocks import ReservedBlocks

LOOKUP_BATCH = 8
"""Number of further waiting requests whose prefixes are looked up in the transaction of a lookup.
It is small because each admission makes the hits of all waiting requests invalid.
"""


class Loads(Transfers, Protocol):
    """Transfers that can load external hits."""

    reserved: ReservedBlocks

    def match(self, request: Request, num_computed_tokens: int) -> ExternalMatch | None:
        """Asks the connector how many tokens after `num_computed_tokens` it can load."""

    def begin_load(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Begins an asynchronous load of the last `num_external_tokens` computed tokens."""


class ExternalHits:
    """Queries the KV connector, before a request is admitted, for tokens after the request's local
    hit (the prefix that is cached in the pool).

    The connector loads these tokens either within the request's first step, or asynchronously
    between steps. For an asynchronous load, blocks are allocated at once, and the request waits in
    `kv_waiting`, without a row of the batch. After the load it is admitted like other requests.
    """

    def __init__(self, state: ReplicaState, transfers: Loads) -> None:
        self._config = state.config
        self._queues = state.queues
        self._running = state.running
        self._steps = state.steps
        self._kv_cache_manager = state.kv_cache_manager
        self._retention = state.retention
        self._transfers = transfers
        self._hit_block_size = hit_block_size(state.config.all_groups)
        self._has_states_only = all(
            group.attention_type is AttentionType.STATE_SPACE for group in state.config.all_groups
        )

    async def plan(
        self, builder: StepBuilder, request: Request, traceparent: str
    ) -> AdmissionPlan | None:
        plan = AdmissionPlan()
        reason = self._own_reason(builder, request)
        if reason is not None:
            plan.decisions.append(PassedOver(request, reason))
            return plan
        if request.holds_blocks:
            self._kv_cache_manager.resume_prefix(builder, request, self._steps)
            builder.prefixes.external[request] = 0
            return None
        await self._look_up(builder, request, traceparent)
        match = self._match(builder, request)
        if match is None:
            plan.decisions.append(PassedOver(request, WaitReason.REMOTE_KV))
            return plan
        builder.prefixes.external[request] = match.num_tokens
        if not (match.is_async and match.num_tokens):
            return None
        reason = await self._begin_load(builder, request, traceparent)
        return plan if reason is None else plan.stop(reason)

    def _match(self, builder: StepBuilder, request: Request) -> ExternalMatch | None:
        """The number of tokens that the connector can load after the local hit, and whether they
        are loaded between steps. None if the connector does not know this yet and must be queried
        again. If the connector loads states, this may extend the local hit by tokens that only
        full-attention layers have cached.

        If the local hit ends inside a block, the connector is queried for the tokens from the start
        of this block on, as in vLLM. If they reach beyond the local hit, the connector loads them,
        and the hit is cut to whole blocks, so that no block is copied. Otherwise nothing is loaded.

        If all layers are state-space layers, a prompt of one token needs no load, because the state
        before the first token is empty.
        """
        if self._has_states_only and request.num_tokens == 1:
            return ExternalMatch(0, is_async=False)
        prefixes = builder.prefixes
        num_local = prefixes.divergent_hits.get(request, prefixes.hits[request])
        num_tail = num_local % self._hit_block_size
        match = self._transfers.match(request, num_local - num_tail)
        if match is None and request.reads_prefix_cache:
            return None
        if match is None or match.num_tokens <= num_tail or not request.reads_prefix_cache:
            return ExternalMatch(0, is_async=False)
        if num_local > prefixes.hits[request]:
            prefixes.note_hit(request, num_local, 0)
            prefixes.diverging.add(request)
        if num_tail:
            prefixes.cut_hit(request, num_local - num_tail)
        return match

    def _own_reason(self, builder: StepBuilder, request: Request) -> WaitReason | None:
        """Returns why a step must skip a request, or None. If a KV load of the request has ended,
        first makes the request ready for admission.
        """
        is_loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if is_loading and self._transfers.promote(request):
            builder.prefixes.forget_hits()
            if not request.holds_blocks:
                self._queues.note_lost_blocks(request)
        if self._queues.is_held_back(request):
            return WaitReason.HELD_BACK
        return builder.passing_over.reason(request)

    async def _look_up(self, builder: StepBuilder, request: Request, traceparent: str) -> None:
        """Looks up the cached prefixes of a request and of further waiting requests. Does nothing
        if the request was looked up after the last admission.
        """
        if request not in builder.prefixes.hits:
            others = (other for other in self._queues.waiting if other not in builder.prefixes.hits)
            unknown = list(dict.fromkeys([request, *islice(others, LOOKUP_BATCH)]))
            await self._kv_cache_manager.look_up(builder, unknown, traceparent)

    async def _begin_load(
        self, builder: StepBuilder, request: Request, traceparent: str
    ) -> WaitReason | None:
        """Begins an asynchronous load with newly allocated blocks, or returns why it cannot."""
        terms = self._load_terms(builder, request)
        num_reserved = terms.num_blocks_kept_free
        if self._retention is not None:
            self._retention.limit(terms, request, len(self._running))
        outcome = await self._kv_cache_manager.admit([terms], traceparent)
        if outcome.stop is not None and outcome.stop.reason is StopReason.RETAINED:
            assert self._retention is not None
            builder.plan.retained = self._retention.held_up(len(self._running))
            return WaitReason.RETAINED
        if not outcome.admitted:
            assert outcome.stop is not None
            is_kept_free = outcome.stop.reason is StopReason.KEPT_FREE
            is_headroom = is_kept_free and terms.num_blocks_kept_free > num_reserved
            return WaitReason.HEADROOM if is_headroom else WaitReason.NO_BLOCKS
        (blocks,) = outcome.admitted
        self._queues.hold(request)
        request.take_blocks(terms, blocks, self._config.block_size, self._config.hash_block_size)
        prefixes = builder.prefixes
        request.num_computed_tokens = prefixes.hits[request] + prefixes.external[request]
        self._transfers.begin_load(request, blocks, prefixes.external[request])
        prefixes.forget_hits()
        return None

    def _load_terms(self, builder: StepBuilder, request: Request) -> Admission:
        """The operation that allocates blocks for an asynchronous load, only up to the end of the
        loaded tokens. It publishes (caches for prefix hits) no blocks.

        If the whole prompt is loaded, its last token is computed again after the load, so the
        blocks in this token's sliding windows are kept. vLLM keeps only the blocks for the token
        after the prompt, and may free a block that the last token needs.
        """
        prefixes = builder.prefixes
        hit, num_external = prefixes.hits[request], prefixes.external[request]
        num_reserved = self._transfers.reserved.count(
            builder.plan.appended_blocks, is_alone=not (self._running or self._transfers.is_moving)
        )
        config, end = self._config, hit + num_external
        is_whole = end == request.num_tokens
        return Admission(
            request=request.key,
            max_hit_tokens=prefixes.max_hit_tokens(request),
            num_hit_tokens=hit,
            num_slots=end,
            num_commit_tokens=0,
            num_reserve_slots=config.num_reserve_slots(request.num_tokens),
            num_watermark_blocks=config.num_watermark_blocks if len(self._running) else 0,
            traceparent=request.traceparent,
            resumed=request.status is RequestStatus.PREEMPTED,
            num_external_tokens=num_external,
            num_blocks_kept_free=num_reserved,
            num_prompt_tokens=request.num_prompt_tokens,
            shared_prefix_boundary=request.shared_prefix_boundary,
            diverges=request in prefixes.diverging,
            num_tokens=end - 1 if is_whole else None,
            num_stored_tokens=end - 1 if is_whole else None,
        )
