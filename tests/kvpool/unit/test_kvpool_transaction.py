"""The operations of a transaction are applied in order, up to the first operation that does not
fit. An invalid transaction has no effect.
"""

import pytest

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import (
    Admission,
    Admit,
    Commit,
    Grow,
    Lookup,
    MalformedTransaction,
    Release,
    Stop,
    StopReason,
)
from services.kvpool.core.errors import (
    InvalidPool,
    RequestAlreadyAdmitted,
    RequestNotAdmitted,
    UnsupportedGroup,
)
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from tests.kvpool.worked_examples import admission, admit, hashes, make_pool

FULL = KVCacheGroup(AttentionType.FULL, 4)


def test_a_transaction_stops_at_the_first_item_that_does_not_fit():
    pool = make_pool(6)
    admit(pool, 1, 4)
    admit(pool, 2, 4)
    outcome = pool.transact([Release([9]), Grow([1, 2, 1], [0, 0, 0], [8, 16, 12]), Release([1])])
    assert outcome.stop == Stop(1, 1, StopReason.NO_BLOCKS)
    assert outcome.results[0] is None
    assert outcome.results[1].groups[0].num_blocks == [1]
    assert outcome.num_free_blocks == 2
    assert len(outcome.results) == 2


def test_blocks_released_earlier_in_a_transaction_can_be_given_out_later():
    pool = make_pool(4)
    admit(pool, 1, 12)
    outcome = pool.transact([Release([1]), Admit([admission(2, 12)])])
    assert outcome.stop is None
    assert outcome.results[1].groups[0].block_ids == [3, 2, 1]


def test_a_request_may_grow_in_the_transaction_that_admits_it():
    pool = make_pool(4)
    outcome = pool.transact([Admit([admission(1, 4)]), Grow([1], [4], [8])])
    assert outcome.results[1].groups[0].block_ids == [2]


@pytest.mark.parametrize(
    ("operation", "error", "field"),
    [
        (Grow([1], [0], []), MalformedTransaction, "operations[1].grow.num_slots"),
        (Grow([1], [], [8]), MalformedTransaction, "operations[1].grow.num_computed_tokens"),
        (Commit([1], [], [()]), MalformedTransaction, "operations[1].commit.num_tokens"),
        (Commit([1], [4], []), MalformedTransaction, "operations[1].commit.num_new_hashes"),
        (Lookup([2], [], [()]), MalformedTransaction, "operations[1].lookup.max_hit_tokens"),
        (Lookup([2], [4], []), MalformedTransaction, "operations[1].lookup.num_new_hashes"),
        (Grow([1, 2], [0, 0], [8, 8]), RequestNotAdmitted, "operations[1].grow.requests[1]"),
        (Commit([2], [4], [()]), RequestNotAdmitted, "operations[1].commit.requests[0]"),
        (Grow([3], [0], [8]), RequestNotAdmitted, "operations[1].grow.requests[0]"),
        (Lookup([1], [4], [()]), RequestAlreadyAdmitted, "operations[1].lookup.requests[0]"),
        (
            Admit([admission(2, 4), admission(2, 4)]),
            RequestAlreadyAdmitted,
            "operations[1].admit.admissions[1].request",
        ),
        (
            Admit([Admission(2, 3, 4, 8, 8, 8)]),
            MalformedTransaction,
            "operations[1].admit.admissions[0].num_hit_tokens",
        ),
        (
            Admit([Admission(2, 8, 8, 7, 7, 7)]),
            MalformedTransaction,
            "operations[1].admit.admissions[0].num_slots",
        ),
    ],
)
def test_a_transaction_that_makes_no_sense_changes_nothing(operation, error, field):
    pool = make_pool(8)
    admit(pool, 1, 4, path="a")
    admit(pool, 3, 4)
    before = (pool.free_block_ids(), pool.stats())
    with pytest.raises(error) as refused:
        pool.transact([Release([3]), operation])
    assert refused.value.field == field
    assert (pool.free_block_ids(), pool.stats()) == before
    assert pool.block_tables(3) == ((2,),)


def test_a_lookup_is_remembered_until_the_request_is_released():
    pool = make_pool(8)
    admit(pool, 1, 8, path="ab")
    first, second = hashes("ab")
    pool.transact([Lookup([2], [8], [[first]])])
    (result,) = pool.transact([Lookup([2], [8], [[second]])]).results
    assert result.num_hit_tokens == [8]
    pool.transact([Release([2])])
    (result,) = pool.transact([Lookup([2], [8], [()])]).results
    assert result.num_hit_tokens == [0]


@pytest.mark.parametrize(
    ("config", "error", "field"),
    [
        (
            PoolConfig(8, (KVCacheGroup(AttentionType.FULL, 0),)),
            InvalidPool,
            "groups[0].block_size",
        ),
        (
            PoolConfig(8, (FULL, KVCacheGroup(AttentionType.CHUNKED_LOCAL, 4, 6))),
            UnsupportedGroup,
            "groups[1].window",
        ),
        (
            PoolConfig(
                8, (FULL, KVCacheGroup(AttentionType.CHUNKED_LOCAL, 4, 8)), drop_last_hit_block=True
            ),
            UnsupportedGroup,
            "groups[1].attention_type",
        ),
        (
            PoolConfig(8, (KVCacheGroup(AttentionType.STATE_SPACE, 4, 8),)),
            UnsupportedGroup,
            "groups[0].window",
        ),
        (
            PoolConfig(8, (KVCacheGroup(AttentionType.FULL, 4, 16),)),
            UnsupportedGroup,
            "groups[0].window",
        ),
    ],
)
def test_a_pool_of_a_shape_that_is_not_served_is_refused_by_field(config, error, field):
    with pytest.raises(error) as refused:
        KVPool(config)
    assert refused.value.field == field
