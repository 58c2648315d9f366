"""Common prefix hits of several kinds of KV-cache groups, with four tokens per block."""

from services.common.pool.operations import Admit, BeginStep, Grow, Stop, StopReason
from tests.kvpool.groups import CHUNK, FULL, STATE, WINDOW, evict, pool_of
from tests.kvpool.worked_examples import admission, admit, commit, grow, hashes, lookup, release


def test_without_prefix_caching_groups_of_all_kinds_find_nothing():
    pool = pool_of(FULL, WINDOW, CHUNK, STATE, caching=False)
    admit(pool, 1, 9, path="ab")
    assert pool.block_tables(1) == ((1, 2, 3), (4, 5, 6), (7, 8, 9), (0, 0, 10))
    assert lookup(pool, 2, 8, "ab") == 0
    grow(pool, 1, 10, computed=9)
    assert pool.block_tables(1) == ((1, 2, 3), (0, 5, 6), (0, 0, 9), (0, 0, 10))
    assert pool.num_common_prefix_blocks() == [0, 0, 0, 0]
    pool.check()


def test_groups_of_two_kinds_agree_on_the_longest_hit_of_both():
    pool = pool_of(FULL, WINDOW, num_blocks=12)
    admit(pool, 1, 16, path="abcd")
    assert pool.block_tables(1) == ((1, 2, 3, 4), (5, 6, 7, 8))
    grow(pool, 1, 17, computed=16)
    assert pool.block_tables(1) == ((1, 2, 3, 4, 9), (0, 0, 7, 8, 10))
    assert lookup(pool, 2, 16, "abcd") == 16
    assert admit(pool, 2, 17, hit=16) == [1, 2, 3, 4, 11]
    assert pool.block_tables(2) == ((1, 2, 3, 4, 11), (0, 0, 7, 8, 6))
    assert pool.num_common_prefix_blocks() == [4, 0]
    pool.check()


def test_a_hit_shrinks_until_every_group_agrees():
    pool = pool_of(FULL, WINDOW, STATE, num_blocks=40)
    # States are cached at tokens 8 and 24. The window's group has freed the blocks before it.
    admit(pool, 1, 8, path="ab")
    commit(pool, 1, 24, hashes("abcdef")[2:])
    grow(pool, 1, 24, computed=8)
    commit(pool, 1, 24)
    grow(pool, 1, 25, computed=24)
    release(pool, 1)
    pool.transact([BeginStep()])
    assert lookup(pool, 2, 100, "abcdef") == 24
    # The hit may have up to 23 tokens. Full attention and the window could hit 20, but a state is
    # cached only at token 8. There the window needs "a" and "ab", which are still cached.
    assert lookup(pool, 3, 23, "abcdef") == 8
    admit(pool, 3, 9, hit=8)
    tables = pool.block_tables(3)
    assert [len(table) for table in tables] == [3, 3, 3]
    assert tables[1][:2] == (3, 4)
    assert tables[2][0] == 0
    pool.check()


def test_a_hit_can_shrink_to_nothing():
    pool = pool_of(WINDOW, STATE, num_blocks=8)
    admit(pool, 1, 8, path="ab")
    assert pool.block_tables(1) == ((1, 2), (0, 3))
    grow(pool, 1, 13, computed=8)
    assert pool.block_tables(1) == ((1, 2, 4, 5), (0, 3, 0, 6))
    release(pool, 1)
    assert pool.free_block_ids() == [6, 5, 4, 7, 2, 1, 3]
    assert lookup(pool, 2, 8, "ab") == 8
    assert admit(pool, 9, 4) == [6]  # allocates block 6 for the window and block 5 for the state
    assert pool.block_tables(9) == ((6,), (5,))
    admit(pool, 8, 8)  # allocates blocks 4, 7 and 2; block 2 stored "ab" of the window
    assert pool.block_tables(8) == ((4, 7), (0, 2))
    assert lookup(pool, 3, 8, "ab") == 0  # the window only hits 4 tokens, the state only 8
    pool.check()


def test_an_admission_counts_what_each_group_needs():
    # For 40 tokens, full attention needs ten blocks, the window five and the state one.
    pool = pool_of(FULL, WINDOW, STATE, num_blocks=18, in_flight=8)
    outcome = pool.transact([Admit([admission(1, 8, reserve=40, watermark=2)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    assert pool.transact([Admit([admission(1, 8, reserve=40, watermark=1)])]).stop is None


def test_a_growth_fits_if_all_groups_do():
    pool = pool_of(FULL, WINDOW, num_blocks=8)
    admit(pool, 1, 12)  # allocates six blocks, so that one is free
    outcome = pool.transact([Grow([1], [8], [16])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    # Query 12 sees tokens 7 to 12, so the window frees block 4. Then each group gets a free block.
    outcome = pool.transact([Grow([1], [12], [16])])
    assert outcome.stop is None
    assert [group.block_ids for group in outcome.results[0].groups] == [[4], [7]]
    assert pool.block_tables(1) == ((1, 2, 3, 4), (0, 5, 6, 7))


def test_events_and_snapshots_name_the_group():
    pool = pool_of(FULL, STATE)
    admit(pool, 1, 8, path="ab")
    grow(pool, 1, 9, computed=8)
    told = [(event.group, event.hashes) for event in pool.take_events()]
    first, second = hashes("ab")
    assert told == [(0, (first, second)), (1, (second,))]
    assert [(event.group, event.hashes) for event in pool.snapshot()] == told


# Hits for EAGLE draft heads, which must leave out the last cached block.


def test_the_last_block_of_a_hit_is_dropped_for_a_draft_head():
    pool = pool_of(FULL, drop_last=True)
    admit(pool, 1, 12, path="abc")
    assert lookup(pool, 2, 100, "abcd") == 8
    assert admit(pool, 2, 13, hit=8) == [1, 2, 4, 5]
    assert lookup(pool, 3, 4, "a") == 0


def test_a_window_with_its_last_block_dropped_is_still_a_whole_window():
    pool = pool_of(WINDOW, num_blocks=8, drop_last=True)
    admit(pool, 1, 16, path="abcd")
    grow(pool, 1, 17, computed=13)  # frees "a" and "ab"
    release(pool, 1)
    assert pool.free_block_ids() == [5, 6, 7, 2, 1, 4, 3]
    assert lookup(pool, 2, 16, "abcd") == 12  # the window is "ab" and "abc"; "abcd" is dropped
    evict(pool, 4)  # evicts "ab"; "abc" and "abcd" are a window, but no block after it is cached
    assert lookup(pool, 2, 16) == 0


def test_states_need_nothing_behind_them_for_a_draft_head():
    pool = pool_of(FULL, STATE, drop_last=True)
    admit(pool, 1, 8, path="abc")
    commit(pool, 1, 12)
    grow(pool, 1, 12, computed=8)
    commit(pool, 1, 12)
    assert lookup(pool, 2, 12, "abc") == 8  # full attention hits 12 tokens and drops 4 of them


# Blocks that all requests share


def test_common_prefix_blocks_are_those_that_every_request_holds():
    pool = pool_of(FULL)
    assert pool.num_common_prefix_blocks() == [0]
    admit(pool, 1, 13, path="abc")
    assert pool.num_common_prefix_blocks() == [4]
    admit(pool, 2, 13, hit=8, path="abx")
    assert pool.num_common_prefix_blocks() == [2]
    admit(pool, 3, 5, path="y")
    assert pool.num_common_prefix_blocks() == [0]
    release(pool, 3)
    assert pool.num_common_prefix_blocks() == [2]
