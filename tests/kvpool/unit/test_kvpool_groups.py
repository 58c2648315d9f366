"""Allocation, freeing and prefix hits of each kind of attention, with four tokens per block."""

from dataclasses import replace

from services.common.pool.operations import (
    Admit,
    BeginStep,
    Grow,
    Operation,
    Release,
    ResetPrefixCache,
    Stop,
    StopReason,
)
from services.kvpool.core.kv_pool import KVPool
from tests.kvpool.groups import CHUNK, FULL, STATE, WINDOW, evict, pool_of
from tests.kvpool.worked_examples import admission, admit, commit, grow, hashes, lookup, release


def test_blocks_that_are_released_as_one_list_enter_the_queue_last_group_first() -> None:
    orders = []
    for as_one_list in (False, True):
        pool = pool_of(FULL, WINDOW, num_blocks=7)
        admit(pool, 1, 12, path="abc")
        pool.transact([Release([1], as_one_list=as_one_list)])
        orders.append(pool.free_block_ids())
    assert orders == [[3, 2, 1, 6, 5, 4], [6, 5, 4, 3, 2, 1]]


# Sliding window.


def test_blocks_outside_the_window_of_the_next_query_are_given_back():
    pool = pool_of(WINDOW)
    assert admit(pool, 1, 12, path="abc") == [1, 2, 3]
    # Query 12 sees tokens 7 to 12. Block 1 stores tokens 0 to 3, and block 2 tokens 4 to 7.
    assert grow(pool, 1, 13, computed=12) == [4]
    assert pool.block_tables(1) == ((0, 2, 3, 4),)
    assert pool.free_block_ids()[-1] == 1  # block 1 has a hash, so it is reused last
    # Query 13 sees tokens 8 to 13.
    assert grow(pool, 1, 14, computed=13) == []
    assert pool.block_tables(1) == ((0, 0, 3, 4),)
    pool.check()


def test_blocks_given_back_without_a_hash_are_given_out_at_once_the_last_one_first():
    pool = pool_of(WINDOW, num_blocks=6, caching=False)
    assert admit(pool, 1, 16) == [1, 2, 3, 4]
    assert grow(pool, 1, 20, computed=16) == [2]  # query 16 sees tokens 11 to 16
    assert pool.block_tables(1) == ((0, 0, 3, 4, 2),)
    assert pool.free_block_ids() == [1, 5]
    release(pool, 1)
    assert pool.free_block_ids() == [2, 4, 3, 1, 5]


def test_what_was_given_back_stays_given_back_when_the_growth_does_not_fit():
    pool = pool_of(WINDOW, num_blocks=5)
    admit(pool, 1, 16)
    outcome = pool.transact([Grow([1], [12], [28])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    assert outcome.num_free_blocks == 1
    assert pool.block_tables(1) == ((0, 2, 3, 4),)


def test_a_window_does_not_move_back():
    pool = pool_of(WINDOW)
    admit(pool, 1, 12, path="abc")
    grow(pool, 1, 13, computed=12)
    grow(pool, 1, 14, computed=13)
    grow(pool, 1, 14, computed=4)
    assert pool.block_tables(1) == ((0, 0, 3, 4),)
    release(pool, 1)
    pool.check()


def test_a_hit_needs_only_the_blocks_of_the_last_window():
    pool = pool_of(WINDOW, num_blocks=8)
    admit(pool, 1, 16, path="abcd")
    grow(pool, 1, 17, computed=16)  # frees blocks 1 and 2
    release(pool, 1)
    assert pool.free_block_ids() == [5, 6, 7, 2, 1, 4, 3]
    evict(pool, 5)  # evicts "a" and "ab"
    assert lookup(pool, 2, 16, "abcd") == 16
    assert admit(pool, 2, 17, hit=16) == [0, 0, 3, 4, 1]
    pool.check()


def test_a_window_is_searched_from_the_right():
    pool = pool_of(WINDOW, num_blocks=8)
    admit(pool, 1, 20, path="abcde")
    release(pool, 1)
    assert pool.free_block_ids() == [6, 7, 5, 4, 3, 2, 1]
    evict(pool, 3)  # evicts "abcde"
    assert lookup(pool, 2, 100, "abcde") == 16
    assert lookup(pool, 3, 15, "abcde") == 12
    assert admit(pool, 3, 16, hit=12) == [0, 2, 3, 5]


def test_with_less_than_a_window_cached_a_hit_must_begin_at_the_first_token():
    pool = pool_of(WINDOW, num_blocks=8)
    admit(pool, 1, 12, path="abc")
    grow(pool, 1, 17, computed=12)  # frees "a"
    release(pool, 1)
    # Blocks 5 and 4 have no hash. Block 1 was freed before blocks 3 and 2.
    assert pool.free_block_ids() == [5, 4, 6, 7, 1, 3, 2]
    assert lookup(pool, 2, 4, "a") == 4
    evict(pool, 6)  # evicts "a" and "abc"; block "ab" alone is no whole window
    assert lookup(pool, 3, 12, "abc") == 0


def test_a_window_is_admitted_with_less_than_the_whole_sequence():
    pool = pool_of(WINDOW, num_blocks=6, in_flight=8)
    # 40 tokens fill ten blocks, but a window with a step of eight tokens needs at most five.
    assert pool.transact([Admit([admission(1, 8, reserve=40)])]).stop is None
    release(pool, 1)
    tight = pool_of(WINDOW, num_blocks=5, in_flight=8)
    outcome = tight.transact([Admit([admission(1, 8, reserve=40)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    # The 20 tokens of this step need five blocks, and four are free.
    outcome = tight.transact([Admit([admission(1, 20)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)


def test_a_request_in_a_window_runs_on_in_four_blocks_for_ever():
    pool = pool_of(WINDOW, num_blocks=5)
    admit(pool, 1, 4)
    for num_computed in range(4, 200):
        grow(pool, 1, num_computed + 1, computed=num_computed)
        assert pool.config.num_blocks - 1 - pool.num_free_blocks <= 3
        pool.check()


def test_null_entries_are_never_published():
    pool = pool_of(WINDOW)
    admit(pool, 1, 16)
    grow(pool, 1, 17, computed=16)  # frees two blocks before their hashes are known
    commit(pool, 1, 17, hashes("abcd"))
    assert pool.num_cached_hashes == 2
    assert [event.hashes for event in pool.take_events()] == [tuple(hashes("abcd")[2:])]
    pool.check()


# Chunked local attention.


def test_blocks_of_earlier_chunks_are_given_back():
    pool = pool_of(CHUNK)
    admit(pool, 1, 8, path="ab")
    assert grow(pool, 1, 8, computed=7) == []
    assert pool.block_tables(1) == ((1, 2),)
    assert grow(pool, 1, 9, computed=8) == [3]
    assert pool.block_tables(1) == ((0, 0, 3),)
    assert pool.free_block_ids()[-2:] == [2, 1]
    pool.check()


def test_what_lies_before_the_current_chunk_is_a_hit_without_being_cached():
    pool = pool_of(CHUNK)
    assert lookup(pool, 1, 12, "abc") == 8  # nothing is cached, and no token before 8 is read
    assert admit(pool, 1, 13, hit=8) == [0, 0, 1, 2]
    assert lookup(pool, 2, 15, "abcx") == 12  # the first block of the chunk from token 8 is cached
    assert admit(pool, 2, 14, hit=12) == [0, 0, 1, 3]
    assert lookup(pool, 3, 15, "xyzw") == 8
    assert admit(pool, 3, 14, hit=8) == [0, 0, 4, 5]
    assert lookup(pool, 4, 7, "x") == 0
    pool.check()


def test_a_chunk_is_admitted_with_less_than_the_whole_sequence():
    pool = pool_of(CHUNK, num_blocks=4, in_flight=4)
    assert pool.transact([Admit([admission(1, 4, reserve=40)])]).stop is None
    release(pool, 1)
    tight = pool_of(CHUNK, num_blocks=4, in_flight=8)
    outcome = tight.transact([Admit([admission(1, 8, reserve=40)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)


# State-space layers.


def test_a_request_has_one_live_state():
    pool = pool_of(STATE)
    assert admit(pool, 1, 8, path="ab") == [0, 1]  # only the end of the step has a state
    assert grow(pool, 1, 9, computed=8) == [2]
    assert pool.block_tables(1) == ((0, 1, 2),)  # the step reads block 1 and writes block 2
    assert grow(pool, 1, 10, computed=9) == []
    assert pool.block_tables(1) == ((0, 0, 2),)
    assert grow(pool, 1, 20, computed=12) == [0, 3]
    assert pool.block_tables(1) == ((0, 0, 2, 0, 3),)
    release(pool, 1)
    pool.check()


def test_a_state_is_of_use_when_it_is_stored_and_found_by_its_hash_alone():
    pool = pool_of(STATE)
    admit(pool, 1, 8, path="ab")
    assert lookup(pool, 2, 8, "abc") == 8
    outcome = pool.transact([Admit([admission(2, 10, hit=8)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)  # the state is not stored yet
    pool.transact([BeginStep()])
    grow(pool, 1, 9, computed=8)
    assert pool.num_cached_hashes == 1
    assert lookup(pool, 2, 8) == 8
    assert lookup(pool, 2, 7) == 0  # no state was stored at token 4
    assert admit(pool, 2, 10, hit=8) == [0, 1, 3]
    release(pool, 1)
    pool.check()
    release(pool, 2)
    assert pool.free_block_ids()[-1] == 1


def test_a_state_needs_one_block_however_long_the_prompt():
    pool = pool_of(STATE, num_blocks=3)
    assert admit(pool, 1, 400)[-2:] == [0, 1]
    assert grow(pool, 1, 401, computed=400) == [2]
    # The step reads one state and writes the other. There is no block for a third state.
    assert pool.transact([Grow([1], [400], [405])]).stop == Stop(0, 0, StopReason.NO_BLOCKS)
    assert grow(pool, 1, 405, computed=404) == [1]


# Ages of reused and evicted blocks.


def test_ages_of_blocks_are_counted_in_transactions():
    pool = pool_of(FULL, num_blocks=4)
    admit(pool, 1, 12, path="abc")  # transaction 1
    release(pool, 1)
    assert lookup(pool, 2, 8, "ab") == 8
    # Transaction 4 hits two blocks that were freed two transactions ago. It evicts the block of
    # "abc", which was cached for three transactions and free for two.
    admit(pool, 2, 9, hit=8)
    stats = pool.stats()
    assert (stats.num_reuses, stats.reuse_gap_transactions) == (2, 4)
    assert stats.num_evictions == 1
    assert stats.evicted_lifetime_transactions == 3
    assert stats.evicted_idle_transactions == 2
    release(pool, 2)
    pool.transact([ResetPrefixCache()])
    assert pool.stats().num_resets == 1
    assert pool.stats().num_evictions == 1
    pool.check()


# Zeroing of new blocks.


def zeroed(pool: KVPool, *operations: Operation) -> tuple[int, ...]:
    return pool.transact(operations).block_ids_to_zero


def test_blocks_handed_out_beside_states_are_to_be_zeroed_but_hits_are_not():
    pool = pool_of(FULL, STATE)
    assert zeroed(pool, Admit([admission(1, 8, path="ab")])) == (1, 2)  # the state is in block 3
    pool.transact([BeginStep()])
    assert zeroed(pool, Grow([1], [8], [13])) == (4, 5)
    assert pool.block_tables(1) == ((1, 2, 4, 5), (0, 3, 0, 6))
    assert zeroed(pool, Grow([1], [12], [13])) == ()
    # Two requests hit blocks 1 and 2 and the state in block 3. Each gets new blocks in both groups.
    two = [admission(2, 9, hit=8, path="ab"), admission(3, 10, hit=8, path="ab")]
    assert zeroed(pool, Admit(two)) == (7, 9)
    assert pool.block_tables(3) == ((1, 2, 9), (0, 3, 10))


def test_what_was_handed_out_before_a_stop_is_to_be_zeroed():
    pool = pool_of(FULL, STATE, num_blocks=6)
    outcome = pool.transact([Admit([admission(1, 4)]), Admit([admission(2, 8), admission(3, 4)])])
    assert outcome.stop == Stop(1, 1, StopReason.NO_BLOCKS)
    assert outcome.block_ids_to_zero == (1, 3, 4)


def test_without_states_nothing_is_to_be_zeroed():
    pool = pool_of(FULL, WINDOW, CHUNK)
    assert zeroed(pool, Admit([admission(1, 8, path="ab")]), Grow([1], [8], [9])) == ()


# Blocks that are loaded from external storage become findable when they are committed.


def test_blocks_that_are_admitted_uncommitted_are_found_only_once_they_are_committed():
    pool = pool_of(FULL)
    loading = replace(admission(1, 13, path="abc"), num_commit_tokens=0)
    assert pool.transact([Admit([loading])]).stop is None
    assert pool.block_tables(1) == ((1, 2, 3, 4),)
    assert lookup(pool, 2, 12, "abc") == 0
    commit(pool, 1, 8)
    assert lookup(pool, 2, 12) == 8
    commit(pool, 1, 12)
    assert lookup(pool, 2, 12) == 12
    pool.check()


def test_a_hit_is_kept_when_what_comes_after_it_is_admitted_uncommitted():
    pool = pool_of(FULL, WINDOW)
    admit(pool, 1, 8, path="ab")
    loading = replace(admission(2, 16, hit=8, path="abcd"), num_commit_tokens=8)
    assert pool.transact([Admit([loading])]).stop is None
    assert pool.block_tables(2) == ((1, 2, 5, 6), (3, 4, 7, 8))
    assert lookup(pool, 3, 16, "abcd") == 8
    commit(pool, 2, 16)
    assert lookup(pool, 3, 16) == 16
    pool.check()


def test_what_never_came_is_given_back_unfound_and_given_out_first():
    pool = pool_of(FULL, num_blocks=8)
    admit(pool, 1, 8, path="ab")
    loading = replace(admission(2, 16, hit=8, path="abcd"), num_commit_tokens=8)
    pool.transact([Admit([loading])])
    release(pool, 1, 2)
    assert pool.free_block_ids() == [4, 3, 5, 6, 7, 2, 1]
    assert lookup(pool, 3, 16, "abcd") == 8
