"""Blocks that are loaded from external storage, in examples with four tokens per block."""

from dataclasses import replace

import pytest

from services.common.pool.operations import (
    Admission,
    Admit,
    Commit,
    EvictBlocks,
    MalformedTransaction,
    Release,
    Stop,
    StopReason,
)
from services.kvpool.core.errors import RequestNotAdmitted
from tests.kvpool.worked_examples import admission, admit, commit, lookup, make_pool, release


def load(
    request: int, num_tokens: int, *, hit: int = 0, path: str = "", kept_free: int = 0
) -> Admission:
    """The admission of a request that loads all tokens after its hit, and computes none yet."""
    return replace(
        admission(request, num_tokens, hit=hit, path=path),
        num_commit_tokens=hit,
        num_external_tokens=num_tokens - hit,
        num_blocks_kept_free=kept_free,
    )


def promoted(request: int, num_computed: int, num_slots: int, *, reserve: int = 0) -> Admission:
    """The admission of a request that was loaded, and now computes up to `num_slots` tokens."""
    return Admission(
        request=request,
        max_hit_tokens=num_computed,
        num_hit_tokens=num_computed,
        num_slots=num_slots,
        num_commit_tokens=num_slots,
        num_reserve_slots=reserve or num_slots,
        holds_blocks=True,
    )


def test_loaded_blocks_are_taken_at_once_and_found_when_they_are_committed():
    pool = make_pool(8)
    admit(pool, 1, 4, path="a")
    assert lookup(pool, 2, 9, "ab") == 4
    outcome = pool.transact([Admit([load(2, 9, hit=4)])])
    assert outcome.admitted == [([1, 2, 3],)]
    assert lookup(pool, 3, 8, "ab") == 4
    commit(pool, 2, 9)
    assert lookup(pool, 3, 8) == 8


def test_a_request_that_holds_blocks_is_admitted_with_its_table():
    pool = make_pool(8)
    pool.transact([Admit([load(1, 6, path="a")])])
    outcome = pool.transact([Commit([1], [6], [()]), Admit([promoted(1, 6, 11)])])
    assert outcome.admitted == [([1, 2, 3],)]
    assert outcome.num_free_blocks == 4


def test_a_load_leaves_free_what_others_were_promised():
    pool = make_pool(5)
    assert pool.transact([Admit([load(1, 8, kept_free=3)])]).stop == Stop(
        0, 0, StopReason.KEPT_FREE
    )
    assert pool.transact([Admit([load(1, 8, kept_free=2)])]).stop is None


def test_what_a_request_reserves_is_not_counted_besides_what_others_were_promised():
    pool = make_pool(5)
    terms = replace(load(1, 4, kept_free=3), num_reserve_slots=16)
    assert pool.transact([Admit([terms])]).stop is None


def test_a_holder_that_does_not_fit_keeps_its_blocks():
    pool = make_pool(4)
    pool.transact([Admit([load(1, 8)])])
    outcome = pool.transact([Admit([promoted(1, 8, 9, reserve=16)])])
    assert outcome.stop == Stop(0, 0, StopReason.NO_BLOCKS)
    assert pool.block_tables(1) == ((1, 2),)


def test_evicted_blocks_are_not_found_and_are_reused_first():
    pool = make_pool(8)
    admit(pool, 1, 12, path="abc")
    pool.transact([EvictBlocks([2, 3])])
    assert lookup(pool, 2, 12, "abc") == 4
    commit(pool, 1, 12)
    assert lookup(pool, 2, 12) == 4
    pool.check()
    release(pool, 1)
    assert pool.free_block_ids() == [3, 2, 4, 5, 6, 7, 1]
    pool.check()


def test_an_evicted_block_that_is_shared_is_free_when_its_last_holder_ends():
    pool = make_pool(8)
    admit(pool, 1, 8, path="ab")
    admit(pool, 2, 13, hit=8, path="abc")
    pool.transact([EvictBlocks([2])])
    pool.transact([Release([1])])
    assert pool.free_block_ids() == [5, 6, 7]
    pool.check()
    pool.transact([Release([2])])
    assert pool.free_block_ids() == [4, 2, 5, 6, 7, 3, 1]
    pool.check()


def test_free_blocks_are_evicted_too_and_are_reused_first():
    pool = make_pool(8)
    admit(pool, 1, 12, path="abc")
    release(pool, 1)
    pool.transact([EvictBlocks([2, 3, 7])])
    assert lookup(pool, 2, 13, "abc") == 4
    assert pool.free_block_ids() == [3, 2, 4, 5, 6, 7, 1]
    pool.check()


def test_terms_that_make_no_sense_are_refused():
    pool = make_pool(8)
    with pytest.raises(RequestNotAdmitted, match="request 1 holds no blocks"):
        pool.transact([Admit([promoted(1, 4, 5)])])
    with pytest.raises(MalformedTransaction, match="num_slots is 8, too few for") as error:
        pool.transact([Admit([replace(load(1, 8), num_external_tokens=9)])])
    assert error.value.field == "operations[0].admit.admissions[0].num_slots"
    pool.transact([Admit([load(1, 8)])])
    with pytest.raises(MalformedTransaction, match="must be 0 for a request that holds blocks"):
        pool.transact([Admit([replace(promoted(1, 4, 9), num_external_tokens=1)])])
    with pytest.raises(MalformedTransaction, match="block 8 does not exist") as error:
        pool.transact([EvictBlocks([1, 8])])
    assert error.value.field == "operations[0].evict_blocks.block_ids[1]"
