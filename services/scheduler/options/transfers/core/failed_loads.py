"""Handles failed KV loads. A block is invalid if it could not be loaded. Requests must compute
their tokens again from their first invalid block on.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from services.common.pool.ids import BlockId
from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.operations import BlockTables
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request


def scheduled_tokens(plans: Iterable[SchedulerOutput]) -> Mapping[Request, int]:
    """Maps each request to its total number of scheduled tokens in these steps."""
    scheduled: Counter[Request] = Counter()
    for plan in plans:
        scheduled.update(dict(zip(plan.requests, plan.num_scheduled_tokens, strict=True)))
    return scheduled


def set_back(
    requests: Iterable[Request],
    block_tables: Mapping[Request, BlockTables],
    group: KVCacheGroup,
    invalid: Collection[BlockId],
    scheduled: Mapping[Request, int],
) -> tuple[set[Request], list[BlockId]]:
    """Resets the computed tokens of each request to the start of its first invalid block. Only for
    models with one KV-cache group.

    As in vLLM, if several requests share an invalid block, only the first request computes the
    block again. For the other requests, the block counts as computed. `scheduled` maps a request to
    its number of tokens in flight, which `num_computed_tokens` includes. Blocks outside the sliding
    window are ignored, because another request may own them now.

    Returns the requests that have an invalid block, and all blocks of these requests from their
    first invalid block on.
    """
    affected: set[Request] = set()
    recomputed: set[BlockId] = set()
    stale: list[BlockId] = []
    for request in requests:
        (blocks,) = block_tables[request]
        num_computed = request.num_computed_tokens - scheduled.get(request, 0)
        own = blocks[: -(-num_computed // group.block_size)]
        seen = range(group.first_seen_block(num_computed), len(own))
        bad = [index for index in seen if own[index] in invalid]
        if not bad:
            continue
        affected.add(request)
        request.draft_token_ids = []
        first = next((index for index in bad if own[index] not in recomputed), None)
        recomputed.update(own[index] for index in bad)
        if first is None:
            request.num_computed_tokens = num_computed
        else:
            request.num_computed_tokens = first * group.block_size
        stale += blocks[bad[0] :]
    return affected, stale


@dataclass(slots=True)
class Recomputations:
    """Tracks wrong blocks until running requests have computed them again. A block is wrong if it
    could not be loaded, or was computed from a wrong block. As in vLLM, hashes of wrong blocks stay
    in the pool's prefix index. Only for models with one KV-cache group.
    """

    _group: KVCacheGroup
    _block_tables: Mapping[Request, BlockTables]
    _ranges: dict[Request, tuple[int, int]] = field(default_factory=dict)
    """Maps a request to the range of positions in its block table that it computes again."""
    _left: list[tuple[int, Sequence[BlockId]]] = field(default_factory=list)
    """Block tables of requests whose blocks were freed while steps in flight computed their tokens,
    each after the number of the last such step.
    """
    _orphaned: set[BlockId] = field(default_factory=set)
    """Wrong blocks that requests freed without having computed them again."""

    def __contains__(self, request: Request) -> bool:
        return request in self._ranges

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, request: Request, num_computed: int) -> None:
        """Records that a request was reset, which had `num_computed` computed tokens before."""
        size = self._group.block_size
        _, end = self._ranges.get(request, (0, 0))
        self._ranges[request] = request.num_computed_tokens // size, max(end, num_computed // size)

    def leave(self, request: Request, in_flight: Sequence[SchedulerOutput]) -> Sequence[BlockId]:
        """Records that the blocks of a request are freed. Returns those wrong blocks that the
        request has not computed again, and whose hashes must be removed.
        """
        blocks = self._block_tables[request][0]
        if any(request in plan.requests for plan in in_flight):
            self._left.append((in_flight[-1].step, list(blocks)))
        first, end = self._ranges.pop(request, (0, 0))
        wrong = blocks[max(first, request.num_computed_tokens // self._group.block_size) : end]
        self._orphaned.update(wrong)
        return wrong

    def take_orphaned(self, step: int) -> set[BlockId]:
        """Returns the wrong blocks that requests have freed since the last call, which other
        requests may still use. Called when the output of step `step` has arrived.
        """
        self._left = [left for left in self._left if left[0] >= step]
        orphaned, self._orphaned = self._orphaned, set()
        return orphaned

    def set_back_early(
        self,
        plan: SchedulerOutput,
        in_flight: Sequence[SchedulerOutput],
        running: Iterable[Request],
    ) -> set[Request]:
        """Resets and returns the requests whose tokens of the step `plan` were computed from wrong
        blocks, which other requests have not computed again yet. They repeat the step.
        """
        pending = self._pending(in_flight)
        scheduled = scheduled_tokens([plan, *in_flight])
        early: set[Request] = set()
        for request in set(plan.requests).intersection(running) - plan.dropped if pending else ():
            before = request.num_computed_tokens
            num_computed = before - scheduled[request]
            own, _ = self._ranges.get(request, (len(self._block_tables[request][0]), 0))
            seen = slice(self._group.first_seen_block(num_computed), own)
            if pending.isdisjoint(self._block_tables[request][0][seen]):
                continue
            early.add(request)
            request.draft_token_ids = []
            request.num_computed_tokens = num_computed
            self.add(request, before)
        return early

    def left_behind(
        self, invalid: Collection[BlockId], in_flight: Sequence[SchedulerOutput]
    ) -> list[BlockId]:
        """Returns the blocks of freed block tables, in each from the first wrong block on. Leaves
        out blocks that running requests compute again.
        """
        pending = self._pending(in_flight)
        wrong = pending.union(invalid)
        return [
            block
            for _, blocks in self._left
            for block in dropwhile(lambda block: block not in wrong, blocks)
            if block not in pending
        ]

    def forget(self) -> None:
        self._ranges.clear()
        self._left.clear()
        self._orphaned.clear()

    def _pending(self, in_flight: Sequence[SchedulerOutput]) -> set[BlockId]:
        """The wrong blocks that requests compute again in steps in flight or later steps."""
        scheduled, pending = scheduled_tokens(in_flight), set[BlockId]()
        for request, (first, end) in list(self._ranges.items()):
            num_computed = request.num_computed_tokens - scheduled.get(request, 0)
            begin = max(first, num_computed // self._group.block_size)
            if begin < end:
                pending.update(self._block_tables[request][0][begin:end])
            else:
                del self._ranges[request]
        return pending
