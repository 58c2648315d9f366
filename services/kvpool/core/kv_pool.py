"""A pool of KV-cache blocks. Transactions allocate and free the blocks of requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool import operations as ops
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId, ContextId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType
from services.kvpool.core.block_map import BlockUse
from services.kvpool.core.block_pool import BlockPool
from services.kvpool.core.events import BlocksStored, Event
from services.kvpool.core.free_queue import FreeQueue, MakeFreeQueue
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.request_blocks import RequestBlocks
from services.kvpool.core.validation import TransactionValidator


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The current occupancy, and counts of the prefix cache since the pool was opened.
    `num_query_tokens` is the number of tokens that admissions looked up. `num_hit_tokens` is the
    number of these tokens that were hits. Requests that resume after a preemption are not counted.
    """

    num_usable_blocks: int
    num_free_blocks: int
    num_cached_hashes: int
    num_requests: int
    num_evictions: int
    num_query_tokens: int
    num_hit_tokens: int
    num_transactions: int
    num_resets: int
    evicted_lifetime_transactions: int
    evicted_idle_transactions: int
    num_reuses: int
    reuse_gap_transactions: int
    num_common_prefix_blocks: tuple[int, ...]


class KVPool:
    """A pool from one opening to the next (a generation). It allocates blocks, but does not decide
    which requests get them. Only `transact` changes it. Follows the rules of vLLM V1's KV-cache
    manager. Not thread-safe.
    """

    def __init__(self, config: PoolConfig, make_free_queue: MakeFreeQueue = FreeQueue) -> None:
        """Creates a pool with all blocks free. Raises InvalidPool or UnsupportedGroup. Simulations
        pass a `make_free_queue` whose queue evicts in another order.
        """
        config.validate()
        self.config = config
        self._hash_block_size = config.hash_block_size
        self._blocks = BlockPool(config.num_blocks, len(config.groups), make_free_queue)
        self._requests = RequestBlocks(config, self._blocks)
        self._coordinator = self._requests.coordinator
        self._groups = self._coordinator.groups
        self._holds_states = any(
            spec.attention_type is AttentionType.STATE_SPACE for spec in config.groups
        )
        self._tables = self._requests.tables

    def transact(self, operations: Sequence[ops.Operation]) -> ops.Outcome:
        """Executes operations in order and stops at the first item (a request of an operation) for
        which blocks are missing. Earlier items are applied, this item and later items are not, with
        one exception: a Grow item for which blocks are missing still frees blocks outside the
        request's window. If MalformedTransaction, RequestNotAdmitted or RequestAlreadyAdmitted is
        raised, nothing was changed.
        """
        TransactionValidator(self._tables.keys(), self.config.num_blocks).validate(operations)
        self._blocks.ages.now += 1
        results: list[ops.OperationResult | None] = []
        stop = None
        for index, operation in enumerate(operations):
            result, stop = self._execute(index, operation)
            results.append(result)
            if stop is not None:
                break
        outcome = ops.Outcome(self._blocks.num_free_blocks, tuple(results), stop)
        if (contexts := self._blocks.contexts) is not None:
            outcome.num_retained_blocks = contexts.num_retained
            outcome.contexts = contexts.take_changes()
        if self._holds_states:
            to_zero = [block for group in self._groups for block in group.take_blocks_to_zero()]
            outcome.block_ids_to_zero = tuple(to_zero)
            outcome.copies = self._blocks.take_copies()
        return outcome

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request uses, cached blocks included."""
        return self._blocks.num_free_blocks

    @property
    def num_retained_blocks(self) -> int:
        """The number of free blocks in retained contexts: cached blocks of ended requests that are
        reused last, because a later request is expected to hit them.
        """
        contexts = self._blocks.contexts
        return 0 if contexts is None else contexts.num_retained

    @property
    def context_ids(self) -> list[ContextId]:
        """The retained contexts that have blocks, in the order in which the blocks are reused."""
        contexts = self._blocks.contexts
        return [] if contexts is None else contexts.ids

    @property
    def num_cached_hashes(self) -> int:
        return self._blocks.num_cached_hashes

    def free_block_ids(self) -> list[BlockId]:
        return self._blocks.free_block_ids()

    def block_tables(self, request: RequestKey) -> tuple[tuple[BlockId, ...], ...]:
        """The blocks of a request in each group. A request without blocks has empty tables."""
        tables = self._tables.get(request)
        if tables is None:
            return tuple(() for _ in self._groups)
        return tuple(tuple(table.blocks) for table in tables)

    def num_common_prefix_blocks(self) -> list[int]:
        """For each group, the number of leading blocks that all requests with blocks share. The
        value is 0 without requests, without prefix caching, and for groups that free blocks early.
        It is used only to compare steps with vLLM's, since no kernel here does cascade attention.
        """
        # Metrics are collected in another thread. To copy the values is atomic.
        tables = list(self._tables.values())
        if not tables or not self.config.enable_prefix_caching:
            return [0 for _ in self._groups]
        return self._coordinator.num_common_blocks(tables[0], len(tables))

    def take_events(self) -> tuple[Event, ...]:
        return self._blocks.take_events()

    def snapshot(self) -> tuple[BlocksStored, ...]:
        return self._blocks.snapshot()

    def stats(self) -> PoolStats:
        ages = self._blocks.ages
        return PoolStats(
            num_usable_blocks=self.config.num_blocks - 1,
            num_free_blocks=self._blocks.num_free_blocks,
            num_cached_hashes=self._blocks.num_cached_hashes,
            num_requests=len(self._tables),
            num_evictions=ages.num_evictions,
            num_query_tokens=self._requests.num_query_tokens,
            num_hit_tokens=self._requests.num_hit_tokens,
            num_transactions=ages.now,
            num_resets=ages.num_resets,
            evicted_lifetime_transactions=ages.lifetime,
            evicted_idle_transactions=ages.idle_before_evict,
            num_reuses=ages.num_reuses,
            reuse_gap_transactions=ages.reuse_gap,
            num_common_prefix_blocks=tuple(self.num_common_prefix_blocks()),
        )

    def block_use(self) -> BlockUse:
        """Returns a copy of the use of the blocks, from which `block_map` makes a map."""
        return BlockUse(
            self.config.num_blocks,
            [
                (request, list(table.blocks))
                for request, tables in self._tables.items()
                for table in tables
            ],
            self._blocks.cached_block_ids,
            self._blocks.shared_block_ids,
            () if self._blocks.contexts is None else list(self._blocks.contexts.retained),
        )

    def check(self) -> None:
        """Checks that free + used + null = total, and that ref_cnt and hashes match the tables.
        Raises AssertionError. The call takes time proportional to the number of blocks of the pool.
        """
        self._blocks.check(
            (group, table.blocks, self._possible_hashes(request, group, len(table.blocks)))
            for request, tables in self._tables.items()
            for group, table in enumerate(tables)
        )
        for request, tables in self._tables.items():
            for group, table in zip(self._groups, tables, strict=True):
                group.check(table, self._requests.chains[request])

    def _possible_hashes(
        self, request: RequestKey, group: int, num_blocks: int
    ) -> list[list[BlockHash]]:
        """For each block of a table, the hashes of prefixes that end in this block."""
        hashes = self._requests.chains[request].hashes
        step = self.config.groups[group].block_size // self._hash_block_size
        return [hashes[start * step : (start + 1) * step] for start in range(num_blocks)]

    def _execute(  # noqa: PLR0911 - one for each kind
        self, index: int, operation: ops.Operation
    ) -> tuple[ops.OperationResult | None, ops.Stop | None]:
        match operation:
            case ops.Grow():
                return self._requests.grow(index, operation)
            case ops.Commit():
                self._requests.publish(
                    operation.requests, operation.num_tokens, operation.new_hashes
                )
                return None, None
            case ops.Release():
                self._requests.release(operation)
                return None, None
            case ops.RankContexts() | ops.DropContexts():
                self._requests.arrange_contexts(operation)
                return None, None
            case ops.RemoveSkippedBlocks():
                self._requests.remove_skipped(operation)
                return None, None
            case ops.Lookup():
                return self._requests.look_up(operation), None
            case ops.Admit():
                return self._requests.admit(index, operation)
            case ops.BeginStep():
                for group in self._groups:
                    group.begin_step()
                return None, None
            case ops.ReleaseCopies(num_copies):
                self._blocks.release_copies(num_copies)
                return None, None
            case ops.EvictBlocks():
                self._requests.evict(operation)
                return None, None
            case ops.ResetPrefixCache():
                return ops.ResetPrefixCacheResult(self._blocks.reset()), None
