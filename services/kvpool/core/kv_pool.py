"""The pool: block tables of requests over shared blocks, changed in transactions."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from services.common.block_hash import BlockHash
from services.common.ids import BlockId, RequestKey
from services.common.kv_cache_groups import AttentionType
from services.common.pool_operations import (
    Admission,
    Admit,
    AdmitResult,
    Commit,
    EvictBlocks,
    GroupBlocks,
    Grow,
    GrowResult,
    Lookup,
    LookupResult,
    Operation,
    OperationResult,
    Outcome,
    Release,
    ResetPrefixCache,
    ResetPrefixCacheResult,
    Stop,
    StopReason,
)
from services.kvpool.core.block_map import BlockMap, block_map
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.coordinator import Coordinator, Tables
from services.kvpool.core.events import BlocksStored, Event
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.stats import PoolStats
from services.kvpool.core.validation import TransactionValidator
from services.kvpool.core.zeroing import block_ids_to_zero


class KVPool:
    """One life of a pool: memory without policy. Not for several threads.

    `transact` is the only way to change it. The rules are those of vLLM V1's KV-cache manager.
    """

    def __init__(self, config: PoolConfig) -> None:
        """Every block is free. Raises InvalidPool or UnsupportedGroup, naming the field."""
        config.validate()
        self.config = config
        self._block_size = config.groups[0].block_size
        self._blocks = BlockPool(config.num_blocks, len(config.groups))
        self._coordinator = Coordinator(config, self._blocks)
        self._groups = self._coordinator.groups
        self._holds_states = any(
            spec.attention_type is AttentionType.STATE_SPACE for spec in config.groups
        )
        self._chains: dict[RequestKey, list[BlockHash]] = {}
        self._tables: dict[RequestKey, Tables] = {}
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    def transact(self, operations: Sequence[Operation]) -> Outcome:
        """Executes operations in order, up to the first item that does not fit.

        Everything before that item is done, and nothing of it or after it, except that a Grow that
        does not fit frees the blocks that the request no longer sees. Raises MalformedTransaction,
        RequestNotAdmitted or RequestAlreadyAdmitted, and then nothing is changed.
        """
        TransactionValidator(self._tables.keys(), self.config.num_blocks).validate(operations)
        self._blocks.ages.now += 1
        results: list[OperationResult | None] = []
        stop = None
        for index, operation in enumerate(operations):
            result, stop = self._execute(index, operation)
            results.append(result)
            if stop is not None:
                break
        outcome = Outcome(self._blocks.num_free_blocks, tuple(results), stop)
        if self._holds_states:
            to_zero = block_ids_to_zero(operations, results, self._block_size)
            return replace(outcome, block_ids_to_zero=to_zero)
        return outcome

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""
        return self._blocks.num_free_blocks

    @property
    def num_cached_hashes(self) -> int:
        """Hashes that can be found."""
        return self._blocks.num_cached_hashes

    def free_block_ids(self) -> list[BlockId]:
        """The free queue, the next block to be given out first."""
        return self._blocks.free_block_ids()

    def block_tables(self, request: RequestKey) -> tuple[tuple[BlockId, ...], ...]:
        """The blocks of a request in each group; empty tables when it holds none."""
        tables = self._tables.get(request)
        if tables is None:
            return tuple(() for _ in self._groups)
        return tuple(tuple(table.blocks) for table in tables)

    def num_common_prefix_blocks(self) -> list[int]:
        """For each group, how many leading blocks all requests that hold blocks share. Zeros
        without a request, without prefix caching, and for groups that free blocks early.

        Today a statistic, which recorded scenarios compare; cascade attention will use it.
        """
        tables = next(iter(self._tables.values()), None)
        if tables is None or not self.config.enable_prefix_caching:
            return [0 for _ in self._groups]
        return self._coordinator.num_common_blocks(tables, len(self._tables))

    def take_events(self) -> tuple[Event, ...]:
        """What entered and left the prefix index since the last call, in order."""
        return self._blocks.take_events()

    def snapshot(self) -> tuple[BlocksStored, ...]:
        """Everything that can be found now."""
        return self._blocks.snapshot()

    def stats(self) -> PoolStats:
        """Occupancy now, and counts since the pool was opened."""
        ages = self._blocks.ages
        return PoolStats(
            num_usable_blocks=self.config.num_blocks - 1,
            num_free_blocks=self._blocks.num_free_blocks,
            num_cached_hashes=self._blocks.num_cached_hashes,
            num_requests=len(self._tables),
            num_evictions=ages.num_evictions,
            num_query_tokens=self._num_query_tokens,
            num_hit_tokens=self._num_hit_tokens,
            num_transactions=ages.now,
            num_resets=ages.num_resets,
            evicted_lifetime_transactions=ages.lifetime,
            evicted_idle_transactions=ages.idle_before_evict,
            num_reuses=ages.num_reuses,
            reuse_gap_transactions=ages.reuse_gap,
            num_common_prefix_blocks=tuple(self.num_common_prefix_blocks()),
        )

    def block_map(self, max_cells: int) -> BlockMap:
        """Which blocks are in use, and whose, in at most so many cells. Costs as much as the pool
        has blocks.
        """
        tables = (
            (request, table.blocks) for request, tables in self._tables.items() for table in tables
        )
        return block_map(
            self.config.num_blocks,
            tables,
            self._blocks.cached_block_ids,
            self._blocks.shared_block_ids,
            max_cells,
        )

    def check(self) -> None:
        """free + used + null = total, counts equal tables, hashes are right.

        Costs as much as the pool has blocks. Raises AssertionError.
        """
        self._blocks.check(
            (group, table.blocks, table.published(self._chains[request]))
            for request, tables in self._tables.items()
            for group, table in enumerate(tables)
        )

    def _execute(
        self, index: int, operation: Operation
    ) -> tuple[OperationResult | None, Stop | None]:
        match operation:
            case Release():
                self._release(operation)
            case Grow():
                return self._grow(index, operation)
            case Commit():
                self._publish(operation.requests, operation.num_tokens, operation.new_hashes)
            case Lookup():
                return self._lookup(operation), None
            case Admit():
                return self._admit(index, operation)
            case ResetPrefixCache():
                return ResetPrefixCacheResult(self._blocks.reset()), None
            case EvictBlocks():
                self._evict(operation)
        return None, None

    def _release(self, release: Release) -> None:
        for request in release.requests:
            self._chains.pop(request, None)
            tables = self._tables.pop(request, None)
            if tables is not None:
                for group, table in zip(self._groups, tables, strict=True):
                    group.free(table)

    def _grow(self, index: int, grow: Grow) -> tuple[GrowResult, Stop | None]:
        if self._coordinator.frees_early:
            return self._grow_one_by_one(index, grow)
        # Tables of one request are equally long here, and nothing is freed in between: all blocks
        # can be taken at once.
        size, num_groups = self._block_size, len(self._groups)
        num_left = self._blocks.num_free_blocks // num_groups
        growing: list[Tables] = []
        num_missing: list[int] = []
        stop = None
        for request, num_slots in zip(grow.requests, grow.num_slots, strict=True):
            tables = self._tables[request]
            missing = max(0, -(-num_slots // size) - len(tables[0].blocks))
            num_left -= missing
            if num_left < 0:
                stop = Stop(index, len(growing), StopReason.NO_BLOCKS)
                break
            growing.append(tables)
            num_missing.append(missing)
        blocks = self._blocks.get_new_blocks(sum(num_missing) * num_groups)
        groups = self._distribute(blocks, growing, num_missing)
        return GrowResult(groups), stop

    def _distribute(
        self, blocks: list[BlockId], growing: Sequence[Tables], num_missing: list[int]
    ) -> tuple[GroupBlocks, ...]:
        """Appends to each request's tables as many of the blocks as it lacks, in order."""
        rest = iter(blocks)
        groups = self._no_blocks()
        for tables, missing in zip(growing, num_missing, strict=True):
            for group, table in zip(groups, tables, strict=True):
                entries = list(islice(rest, missing))
                table.blocks += entries
                group.block_ids.extend(entries)
        for group in groups:
            group.num_blocks.extend(num_missing)
        return groups

    def _grow_one_by_one(self, index: int, grow: Grow) -> tuple[GrowResult, Stop | None]:
        result = GrowResult(self._no_blocks())
        for item, (request, num_computed_tokens, num_slots) in enumerate(
            zip(grow.requests, grow.num_computed_tokens, grow.num_slots, strict=True)
        ):
            tables = self._tables[request]
            self._coordinator.remove_skipped_blocks(
                tables, self._chains[request], num_computed_tokens
            )
            if self._num_missing(tables, num_slots) > self._blocks.num_free_blocks:
                return result, Stop(index, item, StopReason.NO_BLOCKS)
            for group, table, granted in zip(self._groups, tables, result.groups, strict=True):
                _append(granted, group.extend(table, num_slots))
        return result, None

    def _lookup(self, lookup: Lookup) -> LookupResult:
        result = LookupResult([])
        for request, max_hit_tokens, new_hashes in zip(
            lookup.requests, lookup.max_hit_tokens, lookup.new_hashes, strict=True
        ):
            chain = self._chains.setdefault(request, [])
            if self.config.enable_prefix_caching:
                chain.extend(new_hashes)
            hits = self._find_longest_cache_hit(chain, max_hit_tokens)
            result.num_hit_tokens.append(len(hits[0]) * self._block_size)
        return result

    def _admit(self, index: int, admit: Admit) -> tuple[AdmitResult, Stop | None]:
        result = AdmitResult(self._no_blocks())
        for item, admission in enumerate(admit.admissions):
            if admission.holds_blocks:
                tables = self._continue(admission)
                if tables is None:
                    return result, Stop(index, item, StopReason.NO_BLOCKS)
                for granted, table in zip(result.groups, tables, strict=True):
                    _append(granted, table.blocks)
                continue
            chain = [*self._chains.get(admission.request, ()), *admission.new_hashes]
            hits = self._find_longest_cache_hit(chain, admission.max_hit_tokens)
            num_hit_tokens = len(hits[0]) * self._block_size
            if num_hit_tokens != admission.num_hit_tokens:
                return result, Stop(index, item, StopReason.HIT_CHANGED, num_hit_tokens)
            if not self._fits(admission, hits):
                return result, Stop(index, item, StopReason.NO_BLOCKS)
            tables = self._admit_one(admission, hits)
            for granted, table in zip(result.groups, tables, strict=True):
                _append(granted, table.blocks)
        return result, None

    def _fits(self, admission: Admission, hits: list[list[BlockId]]) -> bool:
        """Whether the free blocks suffice. A free block that is a hit stops being free; such blocks
        are counted only if that decides.
        """
        num_step_tokens = admission.num_slots - admission.num_hit_tokens
        now = reserved = admission.num_watermark_blocks
        for group, blocks in zip(self._groups, hits, strict=True):
            num_entries = max(len(blocks), group.first_seen_block(admission.num_computed_tokens))
            now += group.num_missing(num_entries, admission.num_slots)
            reserved += group.num_reserved(blocks, admission.num_reserve_slots, num_step_tokens)
        left = self._blocks.num_free_blocks - max(now + admission.num_blocks_kept_free, reserved)
        return left >= sum(map(len, hits)) or left >= sum(map(self._blocks.count_free, hits))

    def _admit_one(self, admission: Admission, hits: list[list[BlockId]]) -> Tables:
        tables = self._coordinator.admit(hits, admission.num_computed_tokens, admission.num_slots)
        self._tables[admission.request] = tables
        self._publish([admission.request], [admission.num_commit_tokens], [admission.new_hashes])
        if self.config.enable_prefix_caching and not admission.resumed:
            self._num_query_tokens += admission.max_hit_tokens
            self._num_hit_tokens += admission.num_hit_tokens
        return tables

    def _continue(self, admission: Admission) -> Tables | None:
        """Extends the tables of a request that waited while it held blocks, and publishes them.
        None if that does not fit; blocks that it no longer sees may be freed even then.
        """
        tables = self._tables[admission.request]
        num_left = self._blocks.num_free_blocks - admission.num_watermark_blocks
        if self._num_missing(tables, admission.num_reserve_slots) > num_left:
            return None
        self._coordinator.remove_skipped_blocks(
            tables, self._chains[admission.request], admission.num_hit_tokens
        )
        num_left = self._blocks.num_free_blocks - admission.num_watermark_blocks
        num_missing = self._num_missing(tables, admission.num_slots)
        if num_missing + admission.num_blocks_kept_free > num_left:
            return None
        self._coordinator.extend(tables, admission.num_slots)
        self._publish([admission.request], [admission.num_commit_tokens], [admission.new_hashes])
        return tables

    def _num_missing(self, tables: Tables, num_slots: int) -> int:
        """Blocks that tables lack to hold so many slots."""
        return sum(
            group.num_missing(len(table.blocks), num_slots)
            for group, table in zip(self._groups, tables, strict=True)
        )

    def _evict(self, evict: EvictBlocks) -> None:
        evicted = self._blocks.evict(evict.block_ids)
        for tables in self._tables.values() if evicted else ():
            for table in tables:
                unpublished = [
                    position
                    for position, block in enumerate(table.blocks[: table.num_published])
                    if block in evicted
                ]
                table.unpublished = table.unpublished.union(unpublished)

    def _publish(
        self,
        requests: Sequence[RequestKey],
        num_tokens: Sequence[int],
        new_hashes: Sequence[Sequence[BlockHash]],
    ) -> None:
        chains = [self._chains.setdefault(request, []) for request in requests]
        if not self.config.enable_prefix_caching:
            return
        for chain, hashes in zip(chains, new_hashes, strict=True):
            chain.extend(hashes)
        tables = zip(*map(self._tables.__getitem__, requests), strict=True)
        for group, group_tables in zip(self._groups, tables, strict=True):
            group.publish(zip(group_tables, chains, num_tokens, strict=True))

    def _find_longest_cache_hit(
        self, chain: Sequence[BlockHash], max_hit_tokens: int
    ) -> list[list[BlockId]]:
        num_blocks = max_hit_tokens // self._block_size if self.config.enable_prefix_caching else 0
        return self._coordinator.find_longest_cache_hit(chain[:num_blocks])

    def _no_blocks(self) -> tuple[GroupBlocks, ...]:
        return tuple(GroupBlocks([], []) for _ in self._groups)


def _append(granted: GroupBlocks, blocks: Sequence[BlockId]) -> None:
    granted.num_blocks.append(len(blocks))
    granted.block_ids.extend(blocks)
