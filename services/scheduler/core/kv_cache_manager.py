"""The scheduler's side of the conversation with the pool: what is told, when, and what is known.

Every method is at most one transaction. What a request has told the pool is kept with the request;
what is to be told with the next transaction, whatever that is about, waits here.
"""

from collections.abc import Iterable, Sequence

from services.common.block_hash import BlockHash
from services.common.ids import BlockId
from services.common.pool_operations import (
    Admission,
    Admit,
    Commit,
    Grow,
    Lookup,
    Operation,
    Outcome,
    ResetPrefixCache,
)
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.pending_operations import PendingOperations
from services.scheduler.core.ports import KVPool
from services.scheduler.core.request import Request
from services.scheduler.core.step_builder import StepBuilder

_Filling = tuple[int, int, Request]
"""Whose turn, how many known tokens are computed after the step, and who."""


class KVCacheManager:
    """Block tables of requests, as far as the scheduler must know of them: how long they are, and
    how much of them is published.
    """

    def __init__(self, config: SchedulerConfig, pool: KVPool) -> None:
        self.num_free_blocks = config.num_blocks - 1
        self._config = config
        self._pool = pool
        self._pending = PendingOperations()
        self._block_ids_to_zero: list[BlockId] = []
        self._num_lookahead_tokens = config.num_lookahead_tokens
        self._longest = config.max_model_len

    @property
    def has_news(self) -> bool:
        """Whether something waits to be told."""
        return bool(self._pending)

    def num_slots(self, num_tokens: int) -> int:
        """Slots that a running request needs for its first `num_tokens` to be computed."""
        return min(num_tokens + self._num_lookahead_tokens, self._longest)

    def lacks_slots(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request must grow for its first `num_tokens` to be computed."""
        num_slots = request.num_slots
        return num_slots < num_tokens + self._num_lookahead_tokens and num_slots < self._longest

    async def grow(
        self,
        draft: StepBuilder,
        growing: Sequence[Request],
        waking: Iterable[Request],
        asking: Sequence[Request],
        traceparent: str,
    ) -> Outcome:
        """Grows tables for the grants of the draft, publishes what the step fills, and looks up
        who asks; nothing is said where there is nothing to say.

        A block is filled by who is awake, or in the last step of a stride, after which it wakes.
        Publishing comes after all growth, so that no victim is published. A stop names one of
        `growing`; those before it have grown, and nothing was published or looked up.
        """
        operations = self._pending.take()
        if growing:
            operations.append(self._grow(draft, growing))
        filling = self._filling(draft, waking)
        if filling:
            operations.append(self._commit(filling))
        operations += self._look_up(draft, asking)
        outcome = await self._transact(operations, traceparent)
        size = self._config.block_size
        for request, blocks in zip(growing, outcome.grown, strict=False):
            request.num_slots += len(blocks[0]) * size
            draft.appended[request] = blocks
        if outcome.stop is None:
            for _, end, request in filling:
                request.num_committed_blocks = end // size
                request.num_hashes_sent = len(request.block_hashes)
            self._note_hits(draft, asking, outcome)
        return outcome

    async def look_up(
        self, draft: StepBuilder, asking: Sequence[Request], traceparent: str
    ) -> None:
        """Asks how much of each prompt is cached."""
        outcome = await self._transact(self._look_up(draft, asking), traceparent)
        self._note_hits(draft, asking, outcome)

    async def admit(self, admissions: Sequence[Admission], traceparent: str) -> Outcome:
        """Gives waiting requests their blocks, up to the first that does not fit."""
        return await self._transact([Admit(admissions)], traceparent)

    async def flush(self) -> None:
        """Tells the pool now what would otherwise go with the next step."""
        await self._transact(self._pending.take(), "")

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing done, while blocks are in use."""
        outcome = await self._transact([*self._pending.take(), ResetPrefixCache()], "")
        return outcome.reset_done

    def take_block_ids_to_zero(self) -> list[BlockId]:
        """Blocks that were handed out since the last call and must be cleared before their use."""
        block_ids, self._block_ids_to_zero = self._block_ids_to_zero, []
        return block_ids

    def publish_known(self, request: Request) -> None:
        """Publishes blocks that a step filled with tokens which nobody knew when it was planned.

        The last token is known, but not computed.
        """
        end = len(request.token_ids) - 1
        num_full = end // self._config.block_size
        if num_full > request.num_committed_blocks and self._config.enable_prefix_caching:
            self._pending.commit(request.key, end, self._unsent_hashes(request))
            request.num_committed_blocks = num_full
            request.num_hashes_sent = len(request.block_hashes)

    def release(self, request: Request) -> None:
        """Gives back what the pool holds of a request."""
        if request.known_to_pool:
            self._pending.release(request.key)

    def forget(self) -> None:
        """The pool began a new life: nothing is held, nothing is left to tell."""
        self._pending.clear()
        self._block_ids_to_zero.clear()
        self.num_free_blocks = self._config.num_blocks - 1

    def _grow(self, draft: StepBuilder, growing: Sequence[Request]) -> Grow:
        """What is computed for sure are known tokens, whatever drafts a step in flight guesses at.
        Windows move on to there and no further: they do not move back when drafts are rejected.
        """
        computed = [min(request.origin, len(request.token_ids)) for request in growing]
        ends = [request.origin + draft.awake[request] for request in growing]
        return Grow([request.key for request in growing], computed, list(map(self.num_slots, ends)))

    def _filling(self, draft: StepBuilder, waking: Iterable[Request]) -> list[_Filling]:
        """Requests of which the step fills blocks, in the order in which they run."""
        if not self._config.enable_prefix_caching:
            return []
        size = self._config.block_size
        filling: list[_Filling] = []
        for request in waking:
            end = request.origin + request.clock.now + 1
            if end % size == 0 and end <= len(request.token_ids):
                filling.append((request.turn, end, request))
        for request, num_new in draft.awake.items():
            end = request.origin + num_new
            full = (request.num_committed_blocks + 1) * size
            if end >= full and len(request.token_ids) >= full:
                filling.append((request.turn, min(end, len(request.token_ids)), request))
        filling.sort()
        return filling

    def _commit(self, filling: Sequence[_Filling]) -> Commit:
        return Commit(
            [request.key for _, _, request in filling],
            [end for _, end, _ in filling],
            [self._unsent_hashes(request) for _, _, request in filling],
        )

    def _look_up(self, draft: StepBuilder, asking: Sequence[Request]) -> list[Operation]:
        if not self._config.enable_prefix_caching:
            draft.hits.update(dict.fromkeys(asking, 0))
            return []
        if not asking:
            return []
        return [
            Lookup(
                [request.key for request in asking],
                [request.max_hit_tokens for request in asking],
                [self._unsent_hashes(request) for request in asking],
            )
        ]

    def _note_hits(self, draft: StepBuilder, asking: Sequence[Request], outcome: Outcome) -> None:
        for request, hit in zip(asking, outcome.hits, strict=False):
            draft.hits[request] = hit
            request.num_hashes_sent = len(request.block_hashes)
            request.known_to_pool = True

    def _unsent_hashes(self, request: Request) -> list[BlockHash]:
        request.hash_full_blocks(self._config.fingerprint, self._config.block_size)
        return request.block_hashes[request.num_hashes_sent :]

    async def _transact(self, operations: Sequence[Operation], traceparent: str) -> Outcome:
        """One turn on the pool; none for nothing."""
        if not operations:
            return Outcome(self.num_free_blocks)
        outcome = await self._pool.transact(operations, traceparent)
        self.num_free_blocks = outcome.num_free_blocks
        self._block_ids_to_zero += outcome.block_ids_to_zero
        return outcome
