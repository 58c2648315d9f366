"""Invariants of each step of a world (a simulated replica with random requests and failures),
computed from block tables, tokens and limits.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import NULL_BLOCK
from services.common.pool.kv_cache_groups import AttentionType
from services.common.replica.pause_mode import PauseMode
from services.kvpool.core.kv_pool import KVPool
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from tests.scheduler.paged_cache import PagedCache
from tests.scheduler.policy_orders import VICTIM_ORDERS
from tests.worlds.tier import WorldTier
from tests.worlds.workers import stored_tokens

if TYPE_CHECKING:
    from services.scheduler.options.transfers.core.offloading_connector import OffloadingConnector


@dataclass(frozen=True, slots=True)
class Before:
    """The waiting queue in scheduling order, and the pause mode, before a step."""

    queue: list[Request]
    holding: frozenset[Request]
    """Requests of the queue that have blocks."""
    pause_mode: PauseMode | None

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Before":
        if scheduler.retention is not None:
            scheduler.queues.put_in_order()
        queue = list(scheduler.queues.queued)
        holding = frozenset(request for request in queue if request.holds_blocks)
        return cls(queue, holding, scheduler.pause_mode)


def check_plan(
    scheduler: Scheduler,
    pool: KVPool,
    before: Before,
    plan: SchedulerOutput,
    sent: Iterable[SchedulerOutput],
) -> None:
    """Checks all invariants of a planned step. `sent` are the earlier steps in flight."""
    check_limits(scheduler, plan)
    check_states(scheduler)
    check_known_tokens(scheduler.config, plan, sent)
    check_tables(scheduler, pool, plan)
    check_admission_order(before, plan)
    check_victims(scheduler, plan)
    check_pause(scheduler, before, plan)


def check_limits(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """A step does not exceed the limits of tokens, requests, adapters and encoder inputs. It
    schedules each request once.
    """
    config, running = scheduler.config, list(scheduler.running)
    assert plan.num_tokens == sum(plan.num_scheduled_tokens) <= config.token_budget
    assert all(count > 0 for count in plan.num_scheduled_tokens)
    assert len(set(plan.requests)) == len(plan.requests)
    assert set(plan.requests) <= set(running)
    assert len(running) + len(scheduler.queues.between_turns) <= config.max_running
    rows = [request.row for request in running]
    assert len(set(rows)) == len(rows)
    assert None not in rows
    adapters = {request.adapter_digest for request in running} - {b""}
    assert config.max_loras is None or len(adapters) <= config.max_loras
    sizes = [
        request.encoder_inputs[index].num_embeds
        for request, indexes in plan.encoder_inputs.items()
        for index in indexes
    ]
    assert sum(sizes) <= config.encoder_compute_budget


def check_states(scheduler: Scheduler) -> None:
    """A request is in exactly one queue. An ended request is in no queue."""
    everywhere = scheduler.requests
    assert len(set(everywhere)) == len(everywhere)
    assert not any(request.is_finished for request in everywhere)
    for request in scheduler.running:
        assert request.finish_reason is None
        assert request.holds_blocks
    assert all(not request.holds_blocks for request in scheduler.queues.waiting)


def check_known_tokens(
    config: SchedulerConfig, plan: SchedulerOutput, sent: Iterable[SchedulerOutput]
) -> None:
    """A step computes only known tokens, drafts, and tokens sampled by a step in flight."""
    in_flight: Counter[Request] = Counter()
    for earlier in sent:
        ends = _ends(earlier)
        for request, end in zip(earlier.requests, ends, strict=True):
            if end >= request.num_tokens - in_flight[request]:
                in_flight[request] += 1 + config.num_speculative_tokens
    for request, end in zip(plan.requests, _ends(plan), strict=True):
        num_drafts = len(plan.draft_token_ids.get(request, ()))
        assert end - num_drafts <= request.num_tokens + in_flight[request], request.request_id
        assert end <= config.max_model_len


def check_tables(scheduler: Scheduler, pool: KVPool, plan: SchedulerOutput) -> None:
    """A step writes each block for one request only, and no request outside the step has this block
    in its table.

    There are two exceptions. A request that starts a load may share a prefix that this step
    computes. The blocks of a failed load are computed again for all requests by the first request
    that shares them, as in vLLM. With drafts, blocks with recurrent states are not checked, because
    only the workers know which of them a step writes.
    """
    written: Counter[int] = Counter()
    again: set[int] = set()
    recomputing = getattr(scheduler.transfers, "recomputations", ())
    read: set[int] = set()
    starts = plan.num_computed_tokens
    for request, start, end in zip(plan.requests, starts, _ends(plan), strict=True):
        tables = pool.block_tables(request.key)
        for group, table in zip(scheduler.config.all_groups, tables, strict=True):
            first = start // group.block_size
            if group.attention_type is AttentionType.STATE_SPACE:
                if scheduler.config.num_speculative_tokens:
                    continue
                first = (end - 1) // group.block_size
            blocks = table[first : -(-end // group.block_size)]
            assert blocks, f"{request.request_id} has no block to write to"
            assert NULL_BLOCK not in blocks, request.request_id
            written.update(blocks)
            if request in recomputing:
                again.update(blocks)
    begun = {load.request for load in plan.loads}
    for request in set(scheduler.requests) - set(plan.requests) - begun:
        for table in pool.block_tables(request.key):
            read.update(table)
    assert all(count == 1 for count in written.values())
    assert read.isdisjoint(written.keys() - again)


def check_admission_order(before: Before, plan: SchedulerOutput) -> None:
    """Requests are admitted in queue order. Only the requests in `plan.passed_over`, which wait for
    a reason of their own, may be overtaken. A step that preempts admits no request.
    """
    admitted = {*plan.new, *plan.resumed}
    assert len(admitted) == len(plan.new) + len(plan.resumed) == len(plan.block_tables)
    assert not (admitted and plan.preemptions)
    begun = admitted | {load.request for load in plan.loads}
    must_be_begun = False
    for request in reversed(before.queue):
        must_be_begun |= request in begun
        assert not must_be_begun or request in begun or request in plan.passed_over


def check_victims(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Preempted requests are the last running ones in the scheduling policy's order."""
    rank = VICTIM_ORDERS.get(scheduler.config.policy)
    left = [] if rank is None else [rank(request) for request in scheduler.running]
    for preemption in plan.preemptions:
        victim = preemption.victim
        assert victim.row is None
        assert not victim.is_finished
        if rank is not None and left:
            assert rank(victim) >= max(left)


def check_pause(scheduler: Scheduler, before: Before, plan: SchedulerOutput) -> None:
    """In a pause nothing is computed, with one exception: in mode WAIT running requests continue to
    their ends, and preempted requests that still have blocks are resumed.
    """
    if before.pause_mode is None or scheduler.pause_mode is not before.pause_mode:
        return
    if before.pause_mode is PauseMode.WAIT:
        assert not any(
            not request.block_hashes for request in plan.resumed if not request.num_slots
        )
    else:
        assert not plan.requests


class PublishedContents:
    """Checks that the contents of each cached block are those that its hash names."""

    def __init__(self, config: SchedulerConfig, *, follows_states: bool) -> None:
        self._config = config
        self._follows_states = follows_states
        self._digests: dict[BlockHash, dict[int, list[int]]] = defaultdict(dict)
        """Maps each block hash to the sequences with this hash. A sequence is stored as the digest
        at the end of the hash's block, and the digests at all its positions. A hash has two
        sequences if one identifier has items of two sizes.
        """
        self._num_tokens: dict[BlockHash, int] = {}
        """Maps each hash to the number of tokens up to the end of its block."""
        self._seen: dict[Request, tuple[int, int]] = {}

    def learn(self, requests: Iterable[Request]) -> None:
        """Stores the hashes of requests, and the digests of their sequences."""
        size = self._config.hash_block_size
        for request in requests:
            seen = len(request.block_hashes), len(request.token_ids)
            if self._seen.get(request) != seen:
                self._seen[request] = seen
                digests = stored_tokens(request).digests
                for end, block_hash in enumerate(request.block_hashes, start=1):
                    self._digests[block_hash][digests[end * size - 1]] = digests
                    self._num_tokens[block_hash] = end * size

    def check(self, pool: KVPool, cache: PagedCache) -> None:
        """Checks all cached blocks. No step may be in flight."""
        for group, index in enumerate(pool._blocks.indexes):
            if self._is_state(group) and not self._follows_states:
                continue
            for block in index.blocks():
                for block_hash in index.hashes_of(block):
                    contents = cache.contents(block)
                    self._check(block_hash, group, partial(cache.is_held, contents, group))

    def check_tier(
        self, connector: "OffloadingConnector", tier: WorldTier, cache: PagedCache
    ) -> None:
        """Checks that each block in the tier of offloaded blocks has the contents of its key. Skips
        blocks that may not have been stored yet.
        """
        connector.index.check()
        stores = chain(connector._stores.values(), *(sent.blocks for sent in connector._uncertain))
        uncertain = {store.key for store in stores}
        for key, number in connector.index._blocks.items():
            if key in uncertain:
                continue
            held = tier.block(number)
            assert held is not None
            assert held.key == key
            group = int.from_bytes(key[-4:])
            is_held = partial(cache.is_held, held.contents, group)
            self._check(BlockHash(key[:-4]), group, is_held)

    def _check(
        self, block_hash: BlockHash, group: int, is_held: Callable[[int, int], bool]
    ) -> None:
        """Checks one block. `is_held(position, digest)`: whether it has the digest there."""
        end, size = self._num_tokens[block_hash], self._config.all_groups[group].block_size
        begin = end - 1 if self._is_state(group) else (end - 1) // size * size
        assert any(
            all(is_held(position, digests[position]) for position in range(begin, end))
            for digests in self._digests[block_hash].values()
        ), f"a block of group {group} is found by a hash of {end} tokens that it does not hold"

    def _is_state(self, group: int) -> bool:
        return self._config.all_groups[group].attention_type is AttentionType.STATE_SPACE


def _ends(plan: SchedulerOutput) -> list[int]:
    starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
    return [start + count for start, count in zip(starts, counts, strict=True)]
