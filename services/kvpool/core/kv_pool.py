"""The pool: block tables of requests over shared blocks, changed in transactions."""

from collections.abc import Callable, Sequence
from itertools import islice

from services.common.block_hash import BlockHash
from services.common.ids import BlockId, RequestKey
from services.common.kv_cache_groups import AttentionType
from services.common.pool_operations import (
    Admission,
    Admit,
    AdmitResult,
    BeginStep,
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
    ReleaseCopies,
    RemoveSkippedBlocks,
    ResetPrefixCache,
    ResetPrefixCacheResult,
    Stop,
    StopReason,
)
from services.kvpool.core.block_map import BlockMap, block_map
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.coordinator import Coordinator, PrefixHit, Tables
from services.kvpool.core.events import BlocksStored, Event
from services.kvpool.core.group_manager import Chain, GroupHit, Need
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.stats import PoolStats
from services.kvpool.core.validation import TransactionValidator


class KVPool:
    """One life of a pool: memory without policy. Not for several threads.

    `transact` is the only way to change it. The rules are those of vLLM V1's KV-cache manager.
    """

    def __init__(self, config: PoolConfig) -> None:
        """Every block is free. Raises InvalidPool or UnsupportedGroup, naming the field."""
        config.validate()
        self.config = config
        self._block_size = config.groups[0].block_size
        self._hash_block_size = config.hash_block_size
        self._blocks = BlockPool(config.num_blocks, len(config.groups))
        self._coordinator = Coordinator(config, self._blocks)
        self._groups = self._coordinator.groups
        self._holds_states = any(
            spec.attention_type is AttentionType.STATE_SPACE for spec in config.groups
        )
        self._chains: dict[RequestKey, Chain] = {}
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
        if not self._holds_states:
            return Outcome(self._blocks.num_free_blocks, tuple(results), stop)
        to_zero = [block for group in self._groups for block in group.take_blocks_to_zero()]
        copies = self._blocks.take_copies()
        return Outcome(self._blocks.num_free_blocks, tuple(results), stop, tuple(to_zero), copies)

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

    def observe_frees(self, observer: Callable[[Sequence[BlockId]], None]) -> None:
        """Calls the observer with blocks whenever they become free, in the order in which they
        enter the queue.
        """
        self._blocks.observe_frees(observer)

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
            (group, table.blocks, self._possible_hashes(request, group, len(table.blocks)))
            for request, tables in self._tables.items()
            for group, table in enumerate(tables)
        )
        for request, tables in self._tables.items():
            for group, table in zip(self._groups, tables, strict=True):
                group.check(table, self._chains[request])

    def _possible_hashes(
        self, request: RequestKey, group: int, num_blocks: int
    ) -> list[list[BlockHash]]:
        """For each block of a table, the hashes of prefixes that end in it."""
        hashes = self._chains[request].hashes
        step = self.config.groups[group].block_size // self._hash_block_size
        return [hashes[start * step : (start + 1) * step] for start in range(num_blocks)]

    def _execute(  # noqa: PLR0911 - one for each kind
        self, index: int, operation: Operation
    ) -> tuple[OperationResult | None, Stop | None]:
        match operation:
            case Release():
                self._release(operation)
                return None, None
            case RemoveSkippedBlocks():
                self._remove_skipped(operation)
                return None, None
            case Grow():
                return self._grow(index, operation)
            case Commit():
                self._publish(operation.requests, operation.num_tokens, operation.new_hashes)
                return None, None
            case Lookup():
                return self._lookup(operation), None
            case Admit():
                return self._admit(index, operation)
            case BeginStep():
                for group in self._groups:
                    group.begin_step()
                return None, None
            case ReleaseCopies():
                self._blocks.release_copies()
                return None, None
            case EvictBlocks():
                self._evict(operation)
                return None, None
            case ResetPrefixCache():
                return ResetPrefixCacheResult(self._blocks.reset()), None

    def _release(self, release: Release) -> None:
        for request in release.requests:
            self._chains.pop(request, None)
            tables = self._tables.pop(request, None)
            if tables is not None:
                for group, table in zip(self._groups, tables, strict=True):
                    group.free(table)

    def _remove_skipped(self, removal: RemoveSkippedBlocks) -> None:
        for request, num_computed_tokens in zip(
            removal.requests, removal.num_computed_tokens, strict=True
        ):
            if (tables := self._tables.get(request)) is not None:
                self._coordinator.remove_skipped_blocks(tables, num_computed_tokens)

    def _grow(self, index: int, grow: Grow) -> tuple[GrowResult, Stop | None]:
        if not self._coordinator.is_simple:
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
        needs = map(Need, grow.num_slots, grow.num_tokens or grow.num_slots)
        for item, (request, num_computed_tokens, need) in enumerate(
            zip(grow.requests, grow.num_computed_tokens, needs, strict=True)
        ):
            tables = self._tables[request]
            self._coordinator.remove_skipped_blocks(tables, num_computed_tokens)
            if self._num_missing(tables, need) > self._blocks.num_free_blocks:
                return result, Stop(index, item, StopReason.NO_BLOCKS)
            for group, table, granted in zip(self._groups, tables, result.groups, strict=True):
                _append(granted, group.extend(table, need))
        return result, None

    def _lookup(self, lookup: Lookup) -> LookupResult:
        result = LookupResult([], [])
        for request, max_hit_tokens, new_hashes in zip(
            lookup.requests, lookup.max_hit_tokens, lookup.new_hashes, strict=True
        ):
            chain = self._chain(request)
            if self.config.enable_prefix_caching:
                chain.hashes.extend(new_hashes)
            hit = self._find_cache_hit(chain.hashes, max_hit_tokens)
            result.num_hit_tokens.append(hit.num_tokens)
            result.shared_prefix_boundaries.append(hit.shared_prefix_boundary)
            if lookup.with_divergent_hits:
                divergent = self._find_cache_hit(chain.hashes, max_hit_tokens, diverges=True)
                result.num_divergent_hit_tokens.append(divergent.num_tokens)
        return result

    def _admit(self, index: int, admit: Admit) -> tuple[AdmitResult, Stop | None]:
        result = AdmitResult(self._no_blocks())
        for item, admission in enumerate(admit.admissions):
            if admission.holds_blocks:
                continued = self._continue(admission)
                if continued is None:
                    return result, Stop(index, item, StopReason.NO_BLOCKS)
                for granted, table in zip(result.groups, continued, strict=True):
                    _append(granted, table.blocks)
                continue
            known = self._chains.get(admission.request)
            hashes = [*(known.hashes if known else ()), *admission.new_hashes]
            limit, diverges = admission.max_hit_tokens, admission.diverges
            hit = self._find_cache_hit(hashes, limit, diverges=diverges)
            now = hit.num_tokens, hit.shared_prefix_boundary
            if now != (admission.num_hit_tokens, admission.shared_prefix_boundary):
                return result, Stop(index, item, StopReason.HIT_CHANGED, *now)
            hits = [
                GroupHit(blocks, hit.num_tokens, admission.num_computed_tokens)
                for blocks in hit.tables
            ]
            if not self._fits(admission, hits):
                return result, Stop(index, item, StopReason.NO_BLOCKS)
            tables = self._admit_one(admission, hits)
            for granted, table in zip(result.groups, tables, strict=True):
                _append(granted, table.blocks)
        return result, None

    def _fits(self, admission: Admission, hits: Sequence[GroupHit]) -> bool:
        """Whether the free blocks suffice, and what was hit is stored. A free block that is a hit
        stops being free; such blocks are counted only if that decides.
        """
        need = _need(admission)
        now = reserved = admission.num_watermark_blocks
        for group, hit in zip(self._groups, hits, strict=True):
            if not group.is_stored(hit.blocks):
                return False
            now += group.num_missing_behind(hit, need)
            reserved += group.num_reserved_behind(hit, admission.num_reserve_slots)
        left = self._blocks.num_free_blocks - max(now + admission.num_blocks_kept_free, reserved)
        return left >= sum(len(hit.blocks) for hit in hits) or left >= sum(
            self._blocks.count_free(group.counted_hits(hit))
            for group, hit in zip(self._groups, hits, strict=True)
        )

    def _admit_one(self, admission: Admission, hits: Sequence[GroupHit]) -> Tables:
        tables = self._coordinator.admit(hits, _need(admission))
        self._tables[admission.request] = tables
        self._publish_admitted(admission)
        if self.config.enable_prefix_caching and not admission.resumed:
            self._num_query_tokens += admission.max_hit_tokens
            self._num_hit_tokens += admission.num_hit_tokens
        return tables

    def _continue(self, admission: Admission) -> Tables | None:
        """Extends the tables of a request that waited while it held blocks, and publishes them.
        None if that does not fit; blocks that it no longer sees may be freed even then.
        """
        tables, need = self._tables[admission.request], _need(admission)
        num_reserved = sum(
            group.num_reserved(table, admission.num_reserve_slots)
            for group, table in zip(self._groups, tables, strict=True)
        )
        if num_reserved > self._blocks.num_free_blocks - admission.num_watermark_blocks:
            return None
        self._coordinator.remove_skipped_blocks(tables, admission.num_hit_tokens)
        num_left = self._blocks.num_free_blocks - admission.num_watermark_blocks
        num_missing = self._num_missing(tables, need)
        if num_missing + admission.num_blocks_kept_free > num_left:
            return None
        self._coordinator.extend(tables, need)
        self._publish_admitted(admission)
        return tables

    def _publish_admitted(self, admission: Admission) -> None:
        chain = self._chain(admission.request)
        chain.num_prompt_tokens = admission.num_prompt_tokens
        chain.shared_prefix_boundary = admission.shared_prefix_boundary
        self._publish([admission.request], [admission.num_commit_tokens], [admission.new_hashes])

    def _num_missing(self, tables: Tables, need: Need) -> int:
        """Blocks that tables lack to hold so many slots."""
        return sum(
            group.num_missing(table, need)
            for group, table in zip(self._groups, tables, strict=True)
        )

    def _evict(self, evict: EvictBlocks) -> None:
        evicted = self._blocks.evict(evict.block_ids)
        for tables in self._tables.values() if evicted else ():
            for table in tables:
                positions = [
                    position
                    for position, block in enumerate(table.blocks[: table.num_published])
                    if block in evicted
                ]
                table.evicted = table.evicted.union(positions)

    def _publish(
        self,
        requests: Sequence[RequestKey],
        num_tokens: Sequence[int],
        new_hashes: Sequence[Sequence[BlockHash]],
    ) -> None:
        chains = [self._chain(request) for request in requests]
        if not self.config.enable_prefix_caching:
            return
        for chain, hashes in zip(chains, new_hashes, strict=True):
            chain.hashes.extend(hashes)
        tables = zip(*map(self._tables.__getitem__, requests), strict=True)
        for group, group_tables in zip(self._groups, tables, strict=True):
            group.publish(zip(group_tables, chains, num_tokens, strict=True))

    def _chain(self, request: RequestKey) -> Chain:
        """What is known of the tokens of a request."""
        chain = self._chains.get(request)
        if chain is None:
            chain = self._chains[request] = Chain()
        return chain

    def _find_cache_hit(
        self, chain: Sequence[BlockHash], max_hit_tokens: int, *, diverges: bool = False
    ) -> PrefixHit:
        if not self.config.enable_prefix_caching:
            return PrefixHit([[] for _ in self._groups], 0)
        if diverges and self._holds_states:
            return self._coordinator.find_divergent_cache_hit(chain, max_hit_tokens)
        return self._coordinator.find_longest_cache_hit(chain, max_hit_tokens)

    def _no_blocks(self) -> tuple[GroupBlocks, ...]:
        return tuple(GroupBlocks([], []) for _ in self._groups)


def _need(admission: Admission) -> Need:
    """What the request needs for its first step."""
    num_slots, num_tokens = admission.num_slots, admission.num_tokens
    return Need(num_slots, num_slots if num_tokens is None else num_tokens)


def _append(granted: GroupBlocks, blocks: Sequence[BlockId]) -> None:
    granted.num_blocks.append(len(blocks))
    granted.block_ids.extend(blocks)
