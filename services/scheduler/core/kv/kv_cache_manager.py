"""The scheduler's view of the pool of KV blocks. Every method makes at most one transaction with
the pool. To publish a block means to cache it under its hash, so that later requests can hit it.
"""

from collections.abc import Collection, Sequence

from services.common.pool import operations as ops
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId, ContextId
from services.common.pool.operations import Admission, BlockCopy, Commit, Grow, Operation, Outcome
from services.scheduler.core.computed_tokens import num_computed_tokens_of, with_num_computed_tokens
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv.pending_operations import PendingOperations
from services.scheduler.core.planning.step_builder import PlannedSteps, StepBuilder
from services.scheduler.core.policies.retention import Retention
from services.scheduler.core.ports import KVPool, PoolLost
from services.scheduler.core.request import Request

_Filling = tuple[int, int, Request]
"""A request whose blocks a step fills: its admission number, the number of its known tokens that
are computed after the step, and the request.
"""


class KVCacheManager:
    """Allocates blocks for requests, publishes full blocks, and looks up cached prefixes. Tracks
    the length of each request's block table, and how many of its blocks are published.
    """

    def __init__(
        self, config: SchedulerConfig, pool: KVPool, retention: Retention | None = None
    ) -> None:
        self._retention = retention
        self.num_free_blocks = config.num_blocks - 1
        self._config = config
        self._pool = pool
        self.pending = PendingOperations()
        """Operations with which the next transaction begins."""
        self.block_ids_to_zero: list[BlockId] = []
        """Blocks that were allocated since the last step and must be zeroed before use."""
        self.copies: list[BlockCopy] = []
        """Block copies that the workers must make before this step."""
        self._hash_block_size = config.hash_block_size
        self.needs_steps = config.aligns_states and config.enable_prefix_caching
        """Whether the pool must be told where each step begins (operation BeginStep)."""
        self.step_begins = False
        """Whether BeginStep must still be sent for the step that is planned now."""
        self._num_lookahead_tokens = config.num_lookahead_tokens

    def num_slots(self, num_tokens: int) -> int:
        """Number of slots (for one token each) of a running request with `num_tokens` tokens."""
        return min(num_tokens + self._num_lookahead_tokens, self._config.max_model_len)

    def needs_slots(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request may need further slots for its first `num_tokens` tokens."""
        config, num_slots = self._config, request.num_slots
        if not config.only_grows:
            return True
        return (
            num_slots < num_tokens + self._num_lookahead_tokens and num_slots < config.max_model_len
        )

    async def grow(
        self,
        builder: StepBuilder,
        growing: Sequence[Request],
        leaving: Collection[Request],
        looked_up: Sequence[Request],
        steps: PlannedSteps,
        traceparent: str,
    ) -> ops.Stop | None:
        """Allocates blocks for the scheduled tokens of the running requests `growing`, publishes
        the blocks that the step fills, and looks up the prefixes of the waiting requests
        `looked_up`.

        `leaving` are the requests that leave the fast path (see `RunningRequests`) after this step.
        Other requests on the fast path fill no block. `steps` are the earlier steps. Blocks are
        published only after all blocks are allocated, so that no block of a preempted request is
        published.

        Returns None if all blocks were allocated. Otherwise returns the stop at the request that
        lacks blocks. The requests before it then have their blocks, and nothing was published or
        looked up.
        """
        operations: list[Operation] = []
        growth = self._grow(builder, growing, steps) if growing else None
        if growth is not None:
            operations.append(growth)
        filling = self._filling(builder, leaving)
        if filling:
            operations.append(self._commit(filling))
        if looked_up:
            operations += self._look_up(builder, looked_up)
        if self.step_begins:
            operations = self._in_step(operations)
        if self.pending or self._retention is not None:
            operations = self._take_pending() + operations
        if not operations:
            return None
        outcome = self._keep(await self._pool.transact(operations, traceparent))
        if growth is not None:
            self._note_growth(builder, growing, growth, outcome)
        if outcome.stop is None:
            for _, end, request in filling:
                self._note_commit(request, end // self._hash_block_size)
            if looked_up:
                self._note_hits(builder, looked_up, outcome)
        return outcome.stop

    async def catch_up(self, requests: Sequence[Request]) -> None:
        """Allocates and publishes the blocks of steps that a simulation skipped without planning
        them. Enough blocks must be free, all requests must decode, and all layers must have full
        attention.
        """
        operations: list[Operation] = []
        growing = [one for one in requests if self.needs_slots(one, one.num_computed_tokens)]
        if growing:
            starts = num_computed_tokens_of(growing)
            keys = [request.key for request in growing]
            operations.append(Grow(keys, starts, list(map(self.num_slots, starts))))
        filling = self._filled(requests) if self._config.enable_prefix_caching else []
        if filling:
            operations.append(self._commit(filling))
        outcome = await self._transact(operations, "")
        for request, blocks in zip(growing, outcome.grown, strict=True):
            request.num_slots += len(blocks[0]) * self._config.block_size
        for _, end, request in filling:
            self._note_commit(request, end // self._hash_block_size)

    async def look_up(
        self, builder: StepBuilder, looked_up: Sequence[Request], traceparent: str
    ) -> None:
        operations = [*self._take_pending(), *self._in_step(self._look_up(builder, looked_up))]
        outcome = await self._transact(operations, traceparent)
        self._note_hits(builder, looked_up, outcome)

    def resume_prefix(self, builder: StepBuilder, request: Request, steps: PlannedSteps) -> None:
        """Prepares the admission of a request that holds blocks. Its computed tokens become its
        prefix hit.

        If the request is a session (with several turns), steps of its last turn may still be in
        flight. Their tokens will be discarded, but the steps still read blocks of earlier sliding
        windows. To keep these blocks, `num_stored` does not count the tokens in flight.
        """
        prefixes, num_tokens = builder.prefixes, request.num_computed_tokens
        prefixes.hits[request] = num_tokens
        if any(request in plan.requests for plan in steps.in_flight):
            prefixes.num_stored[request] = max(0, num_tokens - steps.num_tokens()(request))
        if self._config.enable_prefix_caching:
            request.hash_full_blocks(self._config.fingerprint, self._hash_block_size)

    async def admit(self, admissions: Sequence[Admission], traceparent: str) -> Outcome:
        """Allocates the blocks of waiting requests, up to the first that lacks blocks."""
        operations: list[Operation] = [ops.Admit(admissions)] if admissions else []
        if self._retention is not None:
            operations = self._retention.rank() + operations
        operations = [*self._take_pending(), *self._in_step(operations)]
        return await self._transact(operations, traceparent)

    async def release_copies(self, num_copies: int, traceparent: str) -> None:
        await self._transact([ops.ReleaseCopies(num_copies)], traceparent)

    async def flush(self) -> None:
        await self._transact(self._take_pending(), "")

    async def reset_prefix_cache(self) -> bool:
        outcome = await self._transact([*self._take_pending(), ops.ResetPrefixCache()], "")
        return outcome.reset_done

    def publish(self, request: Request, num_tokens: int) -> None:
        """Makes the next transaction publish the full blocks of the first `num_tokens` tokens."""
        num_full = num_tokens // self._hash_block_size
        if num_full > request.num_committed_blocks and self._config.enable_prefix_caching:
            hashes = self._unsent_hashes(request, num_full)
            self.pending.commit(request.key, num_tokens, hashes)
            self._note_commit(request, num_full)

    @staticmethod
    def _note_commit(request: Request, num_full: int) -> None:
        request.num_committed_blocks = num_full
        request.num_hashes_sent = max(request.num_hashes_sent, num_full)

    def release(self, request: Request, context: ContextId | None = None) -> None:
        """Makes the next transaction free a request's blocks. With `context`, they stay cached
        under this id for the next request of the agent.
        """
        if request.known_to_pool:
            self.pending.release(request.key, context)

    def check_all_free(self) -> None:
        """Raises PoolLost if blocks are in use, although no request has blocks and no operation is
        pending, which the caller has checked. Such blocks would never be freed.
        """
        if num_used := self._config.num_blocks - 1 - self.num_free_blocks:
            error = (
                f"the kvpool was lost: {num_used} blocks are still in use, although no request has "
                "blocks"
            )
            raise PoolLost(error, suspects=[])

    def forget(self) -> None:
        """Resets the state, because the pool is opened again and empty."""
        self.pending.clear()
        self.block_ids_to_zero.clear()
        self.copies.clear()
        self.num_free_blocks = self._config.num_blocks - 1

    def _take_pending(self) -> list[Operation]:
        operations = self.pending.take() if self.pending else []
        if self._retention is not None:
            operations += self._retention.operations()
        return operations

    def _in_step(self, operations: list[Operation]) -> list[Operation]:
        if operations and self.step_begins:
            self.step_begins = False
            return [ops.BeginStep(), *operations]
        return operations

    def _grow(self, builder: StepBuilder, growing: Sequence[Request], steps: PlannedSteps) -> Grow:
        """Builds the operation that allocates blocks for `growing`. It frees no block that the
        sliding windows of steps in flight still include, because these steps may read the block,
        and their drafts may be rejected.
        """
        starts = num_computed_tokens_of(growing)
        keys = [request.key for request in growing]
        ends = [builder.off_fast_path[request] for request in growing]
        slots = list(map(self.num_slots, ends))
        if self._config.only_grows:
            return Grow(keys, starts, slots)
        num_in_flight = steps.num_tokens()
        stored = [
            max(0, start - num_in_flight(request))
            for start, request in zip(starts, growing, strict=True)
        ]
        for request, num_tokens in zip(growing, stored, strict=True):
            request.num_tokens_left_behind = max(request.num_tokens_left_behind, num_tokens)
        return Grow(keys, stored, slots, ends if self._num_lookahead_tokens else ())

    def _note_growth(
        self, builder: StepBuilder, growing: Sequence[Request], growth: Grow, outcome: Outcome
    ) -> None:
        """Records the new blocks of `growing`. Raises PoolLost if the number of blocks is wrong."""
        size, appended = self._config.block_size, builder.plan.appended_blocks
        only_grows = self._config.only_grows
        for request, blocks, needed in zip(growing, outcome.grown, growth.num_slots, strict=False):
            num_slots = request.num_slots + len(blocks[0]) * size
            if only_grows and not needed <= num_slots < needed + size:
                raise PoolLost(
                    f"the kvpool was lost: it allocated {num_slots} slots for a request that needs "
                    f"{needed}",
                    suspects=[request.key],
                )
            request.num_slots = num_slots
            if only_grows or any(blocks):
                appended[request] = blocks

    def _filling(self, builder: StepBuilder, leaving: Collection[Request]) -> list[_Filling]:
        """The requests whose blocks the step fills, in the order of admission."""
        if not self._config.enable_prefix_caching:
            return []
        size = self._hash_block_size
        filling: list[_Filling] = []
        for request, start in with_num_computed_tokens(leaving):
            end = start + 1
            if end % size == 0 and end <= len(request.token_ids):
                filling.append((request.admission_number, end, request))
        for request, end in builder.off_fast_path.items():
            full, known = (request.num_committed_blocks + 1) * size, len(request.token_ids)
            if end >= full and known >= full:
                filling.append((request.admission_number, min(end, known), request))
        filling.sort()
        return filling

    def _filled(self, requests: Sequence[Request]) -> list[_Filling]:
        """The decoding requests with full blocks that are not published yet. With asynchronous
        scheduling, the last token that counts as computed is left out, because its value is not
        known yet.
        """
        size, num_unknown = self._hash_block_size, int(self._config.async_scheduling)
        return [
            (request.admission_number, end, request)
            for request, computed in with_num_computed_tokens(requests)
            if (end := computed - num_unknown) >= (request.num_committed_blocks + 1) * size
        ]

    def _commit(self, filling: Sequence[_Filling]) -> Commit:
        keys, ends, new_hashes = [], [], []
        for _, end, request in filling:
            keys.append(request.key)
            ends.append(end)
            new_hashes.append(self._unsent_hashes(request, end // self._hash_block_size))
        return Commit(keys, ends, new_hashes)

    def _look_up(self, builder: StepBuilder, looked_up: Sequence[Request]) -> list[Operation]:
        if not (looked_up and self._config.enable_prefix_caching):
            for request in looked_up:
                builder.prefixes.note_hit(request, 0, 0)
            return []
        lookup = ops.Lookup(
            [request.key for request in looked_up],
            [request.max_hit_tokens for request in looked_up],
            [self._unsent_hashes(request) for request in looked_up],
            self._config.hits_may_diverge,
        )
        return [lookup]

    def _note_hits(
        self, builder: StepBuilder, looked_up: Sequence[Request], outcome: Outcome
    ) -> None:
        for request, hit in zip(looked_up, outcome.hits, strict=False):
            builder.prefixes.note_hit(request, *hit)
            request.num_hashes_sent = len(request.block_hashes)
            request.known_to_pool = True
        builder.prefixes.divergent_hits.update(zip(looked_up, outcome.divergent_hits, strict=False))

    def _unsent_hashes(self, request: Request, num_blocks: int | None = None) -> list[BlockHash]:
        """The hashes of the first `num_blocks` blocks (without a number, of all full blocks) that
        were not sent to the pool yet. A Commit operation must contain only hashes of blocks that it
        publishes, because the end of a session's turn may remove the last token of later blocks.
        """
        request.hash_full_blocks(self._config.fingerprint, self._hash_block_size)
        return request.block_hashes[request.num_hashes_sent : num_blocks]

    async def _transact(self, operations: Sequence[Operation], traceparent: str) -> Outcome:
        """Makes one transaction. Without operations, returns an outcome without asking the pool."""
        if not operations:
            return Outcome(self.num_free_blocks)
        return self._keep(await self._pool.transact(operations, traceparent))

    def _keep(self, outcome: Outcome) -> Outcome:
        """Stores the parts of a transaction's outcome that do not belong to a single operation."""
        self.num_free_blocks = outcome.num_free_blocks
        self.block_ids_to_zero += outcome.block_ids_to_zero
        self.copies += outcome.copies
        if self._retention is not None:
            self._retention.note(outcome)
        return outcome
