"""Compares the KV pool with `NaivePool`, a simple model, over random transactions."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.pool.operations import (
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
    MalformedTransaction,
    Operation,
    OperationResult,
    Release,
    RemoveSkippedBlocks,
    ResetPrefixCache,
    ResetPrefixCacheResult,
)
from services.kvpool.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from tests.kvpool.naive_pool import NaivePool
from tests.kvpool.worked_examples import hashes

Option = TypeVar("Option")

# The KV-cache groups of each tested pool, one letter for each group: full attention, sliding
# window, chunked local attention, state-space layers.
POOLS = ["f", "f", "ff", "w", "c", "s", "fw", "wf", "fc", "fs", "wc", "fws", "wcf", "ww"]

REQUESTS = range(6)
MIN_OPERATIONS = 10_000


class Choices:
    """Choices decoded from bytes, one byte each. If no bytes are left, every choice is the first
    option.

    Hypothesis draws one byte string for each transaction instead of dozens of values. So thousands
    of operations run in seconds, and failures still shrink to small examples.
    """

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def upto(self, high: int) -> int:
        return next(self._bytes, 0) % (high + 1)

    def one_of(self, options: Sequence[Option]) -> Option:
        return options[self.upto(len(options) - 1)]

    def some_of(self, options: Iterable[int]) -> list[int]:
        """One to three different options, in any order."""
        left = list(options)
        number = min(1 + self.upto(2), len(left))
        return [left.pop(self.upto(len(left) - 1)) for _ in range(number)]


def spec(kind: str, block_size: int, window: int) -> KVCacheGroup:
    match kind:
        case "w":
            return KVCacheGroup(AttentionType.SLIDING_WINDOW, block_size, window + 1)
        case "c":
            return KVCacheGroup(AttentionType.CHUNKED_LOCAL, block_size, window * block_size)
        case "s":
            return KVCacheGroup(
                AttentionType.STATE_SPACE, block_size, mamba_cache_mode=MambaCacheMode.ALIGN
            )
        case _:
            return KVCacheGroup(AttentionType.FULL, block_size)


class PoolMachine(RuleBasedStateMachine):
    """A KVPool and a NaivePool execute the same transactions. After each, their visible states must
    be equal.

    A request's prompt is a path over two letters, so that prefixes are often shared. Pools are so
    small that blocks are always scarce.
    """

    num_operations = 0

    @initialize(
        num_blocks=st.integers(2, 14),
        kinds=st.sampled_from(POOLS),
        block_size=st.integers(1, 3),
        window=st.integers(1, 5),
        caching=st.sampled_from([True, True, True, False]),
        drop_last=st.booleans(),
        longest=st.integers(8, 40),
        in_flight=st.integers(1, 12),
    )
    def open(
        self,
        num_blocks: int,
        kinds: str,
        block_size: int,
        window: int,
        caching: bool,
        drop_last: bool,
        longest: int,
        in_flight: int,
    ) -> None:
        groups = tuple(spec(kind, block_size, window) for kind in kinds)
        # `drop_last` requires that the block after a hit is cached, too. With three kinds of
        # groups, or two without full attention, KVPool does not search for the longest such hit, as
        # NaivePool does.
        drop_last = drop_last and kinds in {"f", "ff", "w", "ww", "s", "fw", "wf", "fs"}
        self.pool = KVPool(
            PoolConfig(
                num_blocks,
                groups,
                caching,
                drop_last_hit_block=drop_last,
                max_model_len=longest,
                max_in_flight_tokens=in_flight,
            )
        )
        self.naive = NaivePool(num_blocks, groups, caching, drop_last, longest, in_flight)
        self.block_size, self.num_blocks = block_size, num_blocks
        self.is_full = set(kinds) == {"f"}
        self.told: set[tuple[int, bytes]] = set()
        self.paths: dict[int, str] = {}
        self.num_held_slots: dict[int, int] = {}

    @rule(data=st.binary(min_size=24, max_size=56))
    def transact(self, data: bytes) -> None:
        choices = Choices(data)
        self.admitted = set(self.naive.tables)
        self.num_held_slots = {
            request: len(tables[0]) * self.block_size
            for request, tables in self.naive.tables.items()
        }
        operations = [self._choose(choices) for _ in range(1 + choices.upto(3))]
        PoolMachine.num_operations += len(operations)
        expected, misfit = self.naive.transact(operations)
        outcome = self.pool.transact(operations)
        assert [plain(result) for result in outcome.results] == expected
        stop = outcome.stop
        assert misfit == (
            stop
            and (
                *(stop.operation_index, stop.item_index, stop.reason),
                *(stop.num_hit_tokens, stop.shared_prefix_boundary),
            )
        )
        assert outcome.num_free_blocks == len(self.naive.free)

    @rule(data=st.binary(min_size=4, max_size=4))
    def transact_nonsense(self, data: bytes) -> None:
        self.admitted = set(self.naive.tables)
        self.num_held_slots = {}
        before = self.pool.stats()
        with pytest.raises(MalformedTransaction):
            self.pool.transact([self._release(Choices(data)), Grow([], [], [1])])
        assert self.pool.stats() == before

    @invariant()
    def both_are_equal(self) -> None:
        self.pool.check()
        assert self.pool.free_block_ids() == self.naive.free
        for request in REQUESTS:
            tables = [list(table) for table in self.pool.block_tables(request)]
            nothing = [[] for _ in self.pool.config.groups]
            assert tables == self.naive.tables.get(request, nothing)
        assert self.pool.num_common_prefix_blocks() == self.naive.common()
        assert self.pool.stats().num_evictions == self.naive.num_evictions
        assert self.pool.num_cached_hashes == len(self.naive.found())

    @invariant()
    def the_events_tell_what_can_be_found(self) -> None:
        for event in self.pool.take_events():
            match event:
                case BlocksStored(group, new):
                    told = {(group, block_hash) for block_hash in new}
                    assert not told & self.told
                    self.told |= told
                case BlocksRemoved(group, gone):
                    told = {(group, block_hash) for block_hash in gone}
                    assert told <= self.told
                    self.told -= told
                case AllBlocksCleared():
                    self.told.clear()
        assert self.told == self.naive.found()
        snapshot = {(event.group, h) for event in self.pool.snapshot() for h in event.hashes}
        assert snapshot == self.naive.found()

    def _choose(self, choices: Choices) -> Operation:
        """An operation that is valid if all operations that were chosen before it fit."""
        kinds = [self._release]
        if self.admitted:
            kinds += [self._grow, self._grow, self._commit, self._commit, self._evict]
            kinds += [self._remove_skipped]
        kinds += [self._continue] if self.admitted and self.is_full else []
        kinds += [self._lookup, self._admit, self._admit, self._admit] if self._waiting() else []
        return choices.one_of([*kinds, self._reset, self._begin_step])(choices)

    def _waiting(self) -> list[int]:
        return [request for request in REQUESTS if request not in self.admitted]

    def _new_hashes(self, choices: Choices, request: int) -> list[bytes]:
        known = len(self.naive.chains.get(request, []))
        letters = "".join(choices.one_of("ab") for _ in range(choices.upto(4)))
        self.paths[request] = self.paths.get(request, "")[:known] + letters
        return hashes(self.paths[request])[known:]

    def _release(self, choices: Choices) -> Release:
        requests = choices.some_of(REQUESTS)
        self.admitted -= set(requests)
        for request in requests:
            self.num_held_slots.pop(request, None)
        return Release(requests)

    def _reset(self, _: Choices) -> ResetPrefixCache:
        return ResetPrefixCache()

    def _begin_step(self, _: Choices) -> BeginStep:
        return BeginStep()

    def _grow(self, choices: Choices) -> Grow:
        requests = choices.some_of(self.admitted)
        slots = [choices.upto(8 * self.block_size) for _ in requests]
        # A request that this transaction admits has no computed tokens yet, and no request has more
        # computed tokens than slots.
        held = [self.num_held_slots.get(request, 0) for request in requests]
        computed = [choices.upto(min(both)) for both in zip(held, slots, strict=True)]
        return Grow(requests, computed, slots)

    def _remove_skipped(self, choices: Choices) -> RemoveSkippedBlocks:
        requests = [choices.one_of(REQUESTS)]
        held = self.num_held_slots.get(requests[0], 0)
        return RemoveSkippedBlocks(requests, [choices.upto(held)])

    def _commit(self, choices: Choices) -> Commit:
        requests = choices.some_of(self.admitted)
        tokens = [choices.upto(8 * self.block_size) for _ in requests]
        return Commit(requests, tokens, [self._new_hashes(choices, r) for r in requests])

    def _lookup(self, choices: Choices) -> Lookup:
        requests = choices.some_of(self._waiting())
        limits = [choices.upto(6 * self.block_size) for _ in requests]
        return Lookup(requests, limits, [self._new_hashes(choices, r) for r in requests])

    def _admit(self, choices: Choices) -> Admit:
        requests = choices.some_of(self._waiting())
        self.admitted |= set(requests)
        return Admit([self._admission(choices, request) for request in requests])

    def _evict(self, choices: Choices) -> EvictBlocks:
        return EvictBlocks([1 + choices.upto(self.num_blocks - 2) for _ in range(3)])

    def _continue(self, choices: Choices) -> Admit:
        request = choices.one_of(sorted(self.admitted))
        slots = choices.upto(8 * self.block_size)
        computed = choices.upto(min(self.num_held_slots.get(request, 0), slots))
        terms = Admission(
            request=request,
            max_hit_tokens=computed,
            num_hit_tokens=computed,
            num_slots=slots,
            num_commit_tokens=choices.upto(slots),
            num_reserve_slots=choices.upto(8 * self.block_size),
            num_blocks_kept_free=choices.one_of([0, 0, 2]),
            new_hashes=self._new_hashes(choices, request),
            holds_blocks=True,
        )
        return Admit([terms])

    def _admission(self, choices: Choices, request: int) -> Admission:
        num_tokens = 1 + choices.upto(6 * self.block_size)
        new = self._new_hashes(choices, request)
        hit = self.naive.depth(request, new, num_tokens - 1) * self.block_size
        chain = self.naive.chains.get(request, []) + new
        boundary = self.naive.boundary(chain, num_tokens - 1)
        if choices.upto(9) == 9:
            hit = 0
        external = 0
        if self.is_full and choices.upto(4) == 4:
            external = choices.upto(num_tokens - 1 - hit)
        return Admission(
            request=request,
            max_hit_tokens=num_tokens - 1,
            num_hit_tokens=hit,
            num_slots=num_tokens - choices.upto(num_tokens - hit - external),
            num_commit_tokens=num_tokens - choices.upto(num_tokens),
            num_reserve_slots=num_tokens + choices.upto(6 * self.block_size),
            num_watermark_blocks=choices.one_of([0, 0, 0, 1]),
            new_hashes=new,
            shared_prefix_boundary=boundary,
            num_external_tokens=external,
            num_blocks_kept_free=choices.one_of([0, 0, 0, 2]),
        )


def plain(result: OperationResult | None) -> object:
    """A result in the naive pool's format."""
    match result:
        case GrowResult(groups) | AdmitResult(groups):
            return [list(blocks) for blocks in zip(*map(split, groups), strict=True)]
        case LookupResult(num_hit_tokens, shared_prefix_boundaries):
            return list(zip(num_hit_tokens, shared_prefix_boundaries, strict=True))
        case ResetPrefixCacheResult(done):
            return done
        case None:
            return None


def split(blocks: GroupBlocks) -> list[list[int]]:
    ids = iter(blocks.block_ids)
    return [[next(ids) for _ in range(number)] for number in blocks.num_blocks]


@pytest.mark.slow
@pytest.mark.timeout(400)  # shrinking a failure takes Hypothesis up to five minutes
def test_the_pool_equals_a_naive_one_over_thousands_of_operations():
    PoolMachine.num_operations = 0
    numbers = itertools.count()
    while PoolMachine.num_operations < MIN_OPERATIONS:  # a run has a random number of operations
        run_state_machine_as_test(
            seed(next(numbers))(PoolMachine),
            settings=settings(
                max_examples=200, stateful_step_count=60, suppress_health_check=list(HealthCheck)
            ),
        )
