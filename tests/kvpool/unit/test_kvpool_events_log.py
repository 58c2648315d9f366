"""Events report, in order, exactly the hashes that entered or left the pool's prefix index."""

from services.common.pool.operations import Admit, Grow, Release, ResetPrefixCache
from services.kvpool.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored
from tests.kvpool.worked_examples import admission, admit, hashes, make_pool, release


def test_hashes_that_enter_and_leave_are_told_in_order():
    pool = make_pool(4)
    a, b, c = hashes("abc")
    (x,) = hashes("x")
    admit(pool, 1, 12, path="abc")
    assert pool.take_events() == (BlocksStored(0, (a, b, c)),)
    pool.transact([Release([1]), Admit([admission(2, 4, path="x")]), Grow([2], [4], [12])])
    assert pool.take_events() == (
        BlocksRemoved(0, (c,)),
        BlocksStored(0, (x,)),
        BlocksRemoved(0, (b, a)),
    )
    assert pool.take_events() == ()


def test_a_second_block_of_a_hash_is_no_news():
    pool = make_pool(6)
    admit(pool, 1, 4, path="a")
    pool.take_events()
    admit(pool, 2, 4, path="a")
    release(pool, 1)
    assert admit(pool, 3, 16) == [3, 4, 5, 1]
    assert pool.take_events() == ()  # block 1 was evicted, but block 2 still stores "a"
    release(pool, 2)
    release(pool, 3)
    admit(pool, 4, 20)
    assert pool.take_events() == (BlocksRemoved(0, tuple(hashes("a"))),)


def test_a_reset_makes_what_was_noted_before_it_irrelevant():
    pool = make_pool(4)
    admit(pool, 1, 4, path="a")
    pool.transact([Release([1]), ResetPrefixCache(), Admit([admission(2, 4, path="x")])])
    assert pool.take_events() == (AllBlocksCleared(), BlocksStored(0, tuple(hashes("x"))))


def test_a_snapshot_holds_all_that_can_be_found_in_each_group():
    pool = make_pool(8, num_groups=2)
    assert pool.snapshot() == ()
    admit(pool, 1, 8, path="ab")
    chain = tuple(hashes("ab"))
    assert pool.snapshot() == (BlocksStored(0, chain), BlocksStored(1, chain))
