"""Allocation and prefix hits, in examples with four tokens per block."""

from services.common.pool.operations import Admit, ResetPrefixCache, Stop, StopReason
from tests.kvpool.worked_examples import (
    admission,
    admit,
    commit,
    grow,
    hashes,
    lookup,
    make_pool,
    release,
)


def test_the_null_block_is_never_given_out():
    pool = make_pool(4)
    assert admit(pool, 1, 12) == [1, 2, 3]
    assert pool.num_free_blocks == 0


def test_a_table_grows_by_whole_blocks_and_never_shrinks():
    pool = make_pool(8)
    assert admit(pool, 1, 5) == [1, 2]
    assert grow(pool, 1, 8) == []
    assert grow(pool, 1, 9) == [3]
    assert grow(pool, 1, 4) == []
    assert pool.block_tables(1) == ((1, 2, 3),)


def test_blocks_without_a_hash_are_reused_first_the_last_one_foremost():
    pool = make_pool(8, caching=False)
    admit(pool, 1, 12)
    assert pool.free_block_ids() == [4, 5, 6, 7]
    release(pool, 1)
    assert pool.free_block_ids() == [3, 2, 1, 4, 5, 6, 7]


def test_blocks_with_a_hash_are_reused_last_the_end_of_the_prefix_first():
    pool = make_pool(8)
    admit(pool, 1, 10, path="ab")  # two full blocks and a partly filled one
    release(pool, 1)
    assert pool.free_block_ids() == [3, 4, 5, 6, 7, 2, 1]


def test_requests_are_released_in_the_order_given():
    pool = make_pool(8)
    admit(pool, 1, 8, path="ab")
    admit(pool, 2, 8, path="xy")
    release(pool, 2, 1)
    assert pool.free_block_ids() == [5, 6, 7, 4, 3, 2, 1]


def test_a_request_unknown_to_the_pool_is_passed_over_by_a_release():
    pool = make_pool(4)
    admit(pool, 1, 4)
    release(pool, 7, 1, 1)
    assert pool.num_free_blocks == 3


def test_a_freed_prefix_is_found_again_in_the_same_blocks():
    pool = make_pool(8)
    admit(pool, 1, 12, path="abc")
    release(pool, 1)
    assert lookup(pool, 2, 100, "abd") == 8
    assert admit(pool, 2, 12, hit=8) == [1, 2, 4]
    assert pool.free_block_ids() == [5, 6, 7, 3]  # removed from the middle of the queue


def test_two_requests_share_the_blocks_of_a_prefix():
    pool = make_pool(8)
    assert admit(pool, 1, 9, path="ab") == [1, 2, 3]
    assert admit(pool, 2, 9, hit=8, path="ab") == [1, 2, 4]
    release(pool, 1)
    assert pool.free_block_ids() == [3, 5, 6, 7]
    release(pool, 2)
    assert pool.free_block_ids() == [4, 3, 5, 6, 7, 2, 1]
    pool.check()


def test_a_hit_leaves_a_token_to_compute():
    pool = make_pool(8)
    admit(pool, 1, 8, path="ab")
    assert lookup(pool, 2, 7, "ab") == 4
    # Request 2 has no hit of "ab", so it computes its tokens again, although block 2 stores them.
    assert admit(pool, 2, 8, hit=4) == [1, 3]
    assert pool.num_cached_hashes == 2


def test_of_two_blocks_with_one_hash_the_first_published_is_found():
    pool = make_pool(6)
    admit(pool, 1, 8, path="ab")
    admit(pool, 2, 8, hit=4, path="ab")  # gets blocks 1 and 3; blocks 2 and 3 both store "ab"
    assert admit(pool, 3, 9, hit=8, path="ab") == [1, 2, 4]
    release(pool, 3, 1, 2)
    assert pool.free_block_ids() == [4, 5, 2, 3, 1]
    assert admit(pool, 4, 12) == [4, 5, 2]  # evicts block 2, so that only block 3 stores "ab"
    assert pool.num_cached_hashes == 2
    assert admit(pool, 5, 8, hit=4, path="ab") == [1, 3]
    release(pool, 5)
    assert lookup(pool, 6, 8, "ab") == 8


def test_a_hash_may_come_twice_in_one_chain():
    pool = make_pool(4)
    admit(pool, 1, 8)
    (block_hash,) = hashes("a")
    commit(pool, 1, 8, [block_hash, block_hash])
    assert pool.num_cached_hashes == 1
    pool.check()
    release(pool, 1)
    assert pool.free_block_ids() == [3, 2, 1]
    assert admit(pool, 2, 12) == [3, 2, 1]
    assert pool.num_cached_hashes == 0
    pool.check()


def test_giving_out_a_cached_block_forgets_its_hash():
    pool = make_pool(4)
    admit(pool, 1, 12, path="abc")
    release(pool, 1)
    assert pool.free_block_ids() == [3, 2, 1]
    assert admit(pool, 2, 4) == [3]
    assert lookup(pool, 3, 12, "abc") == 8
    assert pool.stats().num_evictions == 1


def test_only_blocks_wholly_below_the_committed_tokens_are_published():
    pool = make_pool(8)
    admit(pool, 1, 6)
    commit(pool, 1, 7, hashes("ab"))
    assert pool.num_cached_hashes == 1
    grow(pool, 1, 8)
    commit(pool, 1, 8)
    assert pool.num_cached_hashes == 2
    commit(pool, 1, 8)
    assert pool.num_cached_hashes == 2


def test_a_block_whose_hash_is_not_known_is_not_published():
    pool = make_pool(8)
    admit(pool, 1, 12, path="a")
    assert pool.num_cached_hashes == 1
    commit(pool, 1, 12, hashes("abc")[1:])
    assert pool.num_cached_hashes == 3


def test_nothing_is_published_or_found_without_prefix_caching():
    pool = make_pool(8, caching=False)
    admit(pool, 1, 8, path="ab")
    assert pool.num_cached_hashes == 0
    assert lookup(pool, 2, 8, "ab") == 0
    assert pool.take_events() == ()
    assert pool.stats().num_query_tokens == 0


def test_an_admission_sees_what_earlier_ones_in_its_transaction_published():
    pool = make_pool(8)
    outcome = pool.transact(
        [Admit([admission(1, 9, path="ab"), admission(2, 9, hit=8, path="ab")])]
    )
    (group,) = outcome.results[0].groups
    assert group.num_blocks == [3, 3]
    assert group.block_ids == [1, 2, 3, 1, 2, 4]


def test_an_admission_needs_room_for_the_whole_sequence():
    pool = make_pool(4)
    outcome = pool.transact([Admit([admission(1, 4, reserve=13)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    outcome = pool.transact([Admit([admission(1, 4, reserve=12)])])
    assert outcome.stop is None
    assert outcome.num_free_blocks == 2  # the blocks of later tokens are not allocated yet


def test_an_admission_leaves_the_watermark_free():
    pool = make_pool(4)
    outcome = pool.transact([Admit([admission(1, 8, watermark=2)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    assert pool.transact([Admit([admission(1, 8, watermark=1)])]).stop is None


def test_a_hit_on_a_free_block_counts_as_a_free_block_needed():
    pool = make_pool(5)
    admit(pool, 1, 8, path="ab")
    release(pool, 1)
    # The request needs two blocks of its hit and three new ones. In all, four blocks are free.
    outcome = pool.transact([Admit([admission(2, 20, hit=8, path="ab")])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    assert admit(pool, 2, 16, hit=8, path="ab") == [1, 2, 3, 4]


def test_a_hit_on_a_block_in_use_needs_no_free_block():
    pool = make_pool(5)
    admit(pool, 1, 12, path="abc")
    assert pool.num_free_blocks == 1
    assert admit(pool, 2, 13, hit=12, path="abc") == [1, 2, 3, 4]


def test_an_admission_that_stops_remembers_nothing():
    pool = make_pool(4)
    outcome = pool.transact([Admit([admission(1, 16, path="abcd")])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    assert pool.num_free_blocks == 3
    assert admit(pool, 1, 8, path="ab") == [1, 2]
    assert lookup(pool, 2, 8, "ab") == 8


def test_a_hit_that_changed_stops_the_transaction():
    pool = make_pool(8)
    assert lookup(pool, 2, 8, "ab") == 0
    admit(pool, 1, 8, path="ab")
    outcome = pool.transact([Admit([admission(2, 9)])])
    assert outcome.stop == Stop(0, 0, StopReason.HIT_CHANGED, 8)
    assert admit(pool, 2, 9, hit=8) == [1, 2, 3]


def test_a_hit_that_was_evicted_since_its_look_up_stops_the_transaction():
    pool = make_pool(5)
    admit(pool, 1, 8, path="ab")
    release(pool, 1)
    assert lookup(pool, 2, 8, "ab") == 8
    assert admit(pool, 3, 12) == [3, 4, 2], "two blank blocks, and the end of the prefix"
    release(pool, 3)
    outcome = pool.transact([Admit([admission(2, 9, hit=8)])])
    assert outcome.stop == Stop(0, 0, StopReason.HIT_CHANGED, 4)


def test_a_hit_that_was_reset_since_its_look_up_stops_the_transaction():
    pool = make_pool(5)
    admit(pool, 1, 8, path="ab")
    release(pool, 1)
    assert lookup(pool, 2, 8, "ab") == 8
    pool.transact([ResetPrefixCache()])
    outcome = pool.transact([Admit([admission(2, 9, hit=8)])])
    assert outcome.stop == Stop(0, 0, StopReason.HIT_CHANGED, 0)


def test_hits_of_resumed_requests_are_kept_out_of_the_statistics():
    pool = make_pool(8)
    admit(pool, 1, 9, path="ab")
    release(pool, 1)
    assert pool.transact([Admit([admission(1, 9, hit=8, path="ab", resumed=True)])]).stop is None
    stats = pool.stats()
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (8, 0)


def test_a_reset_forgets_every_hash_and_keeps_the_order_of_the_queue():
    pool = make_pool(6)
    admit(pool, 1, 8, path="ab")
    assert not pool.transact([ResetPrefixCache()]).results[0].done
    release(pool, 1)
    before = pool.free_block_ids()
    assert before == [3, 4, 5, 2, 1]
    assert pool.transact([ResetPrefixCache()]).results[0].done
    assert pool.free_block_ids() == before
    assert pool.num_cached_hashes == 0
    assert admit(pool, 2, 16) == [3, 4, 5, 2]
    assert pool.stats().num_evictions == 0
    pool.check()


def test_every_group_has_its_own_blocks_and_a_hit_is_one_that_all_have():
    pool = make_pool(12, num_groups=2)
    admit(pool, 1, 8, path="ab")
    assert pool.block_tables(1) == ((1, 2), (3, 4))
    assert pool.num_cached_hashes == 4
    release(pool, 1)
    assert pool.free_block_ids() == [5, 6, 7, 8, 9, 10, 11, 2, 1, 4, 3]
    admit(pool, 2, 16)  # eight blocks: evicts "ab" in the first group
    assert pool.block_tables(2) == ((5, 6, 7, 8), (9, 10, 11, 2))
    release(pool, 2)
    assert lookup(pool, 3, 8, "ab") == 4
    admit(pool, 3, 5, hit=4)
    assert pool.block_tables(3) == ((1, 2), (3, 11))
    pool.check()
