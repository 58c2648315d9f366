"""A pool's answer that contradicts its transaction is refused with the name of the field."""

import pytest
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.pool.block_hash import BlockHash
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import (
    Admission,
    Admit,
    AdmitResult,
    BeginStep,
    BlockCopy,
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
from services.scheduler.adapters.pool.outcome_check import OutcomeCheck, requests_of
from services.scheduler.adapters.workers.answer_check import WrongAnswer

GROUPS = (KVCacheGroup(AttentionType.FULL, 4), KVCacheGroup(AttentionType.FULL, 8))
MIXED = (GROUPS[0], KVCacheGroup(AttentionType.STATE_SPACE, 8))
NO_BLOCKS, HIT_CHANGED = StopReason.NO_BLOCKS, StopReason.HIT_CHANGED
HASH = BlockHash(bytes(32))
OPERATIONS: list[Operation] = [
    Release([1]),
    Grow([2, 3], [4, 4], [5, 5]),
    Lookup([4, 5], [9, 3], [[HASH], []]),
    Admit([Admission(6, 9, 4, 10, 10, 0), Admission(7, 3, 0, 4, 4, 0)]),
]
GROWN = GrowResult((GroupBlocks([1, 1], [1, 2]), GroupBlocks([0, 0], [])))
FOUND = LookupResult([8, 0], [0, 4])
ADMITTED = AdmitResult((GroupBlocks([3, 1], [3, 4, 5, 6]), GroupBlocks([2, 1], [7, 8, 9])))
RESULTS: tuple[OperationResult | None, ...] = (None, GROWN, FOUND, ADMITTED)


def with_result(index: int, result: OperationResult | None, stop: Stop | None = None) -> Outcome:
    return Outcome(5, (*RESULTS[:index], result, *RESULTS[index + 1 :]), stop)


def grown(*groups: GroupBlocks) -> Outcome:
    return with_result(1, GrowResult(groups))


def admitted(*groups: GroupBlocks) -> Outcome:
    return with_result(3, AdmitResult(groups))


def stopped(index: int, item: int, reason: StopReason = NO_BLOCKS, hit: int = 0) -> Outcome:
    return Outcome(5, RESULTS[: index + 1], Stop(index, item, reason, hit))


WRONG = {
    "num_free_blocks: is 20, but the kvpool has only 19": Outcome(20, RESULTS),
    "results: has 3 results for 4 operations": Outcome(5, RESULTS[:3]),
    "results: has 4 results for 4 operations": Outcome(5, RESULTS, Stop(2, 0, NO_BLOCKS)),
    "results: has 4 results for 4 operations ": Outcome(5, RESULTS, Stop(4, 0, NO_BLOCKS)),
    r"results\[0\]: is not the result of the operation Release": with_result(0, GROWN),
    r"results\[1\]: is not the result of the operation Grow": with_result(1, FOUND),
    r"results\[3\]: is not the result of the operation Admit": with_result(3, None),
    "groups: has 1 KV-cache groups, not 2": grown(GROWN.groups[0]),
    "num_blocks: has 1 values for 2 requests": grown(GroupBlocks([1], [1]), GROWN.groups[1]),
    "block_ids: has 3 blocks": grown(GroupBlocks([1, 1], [1, 2, 3]), GROWN.groups[1]),
    "block_ids: a block is not from 1 to 19": grown(GroupBlocks([1, 1], [1, 20]), GROWN.groups[1]),
    "block_ids: a block is not from 1 to 19 ": grown(GroupBlocks([1, 1], [0, 2]), GROWN.groups[1]),
    "block_ids: a block is allocated twice": grown(GroupBlocks([1, 1], [2, 2]), GROWN.groups[1]),
    "num_blocks: is 2 for a request that needs 3": admitted(
        GroupBlocks([2, 2], [3, 4, 5, 6]), ADMITTED.groups[1]
    ),
    "num_blocks: is 3 for a request that needs 2": admitted(
        ADMITTED.groups[0], GroupBlocks([3, 1], [7, 8, 9, 10])
    ),
    "block_ids: a block is allocated twice ": admitted(
        GroupBlocks([3, 1], [3, 3, 5, 6]), ADMITTED.groups[1]
    ),
    "num_hit_tokens: .1, 2, 0. values": with_result(2, LookupResult([8], [0, 4])),
    "num_hit_tokens: .2, 1, 0. values": with_result(2, LookupResult([8, 0], [0])),
    "num_hit_tokens: .2, 2, 2. values": with_result(2, LookupResult([8, 0], [0, 4], [8, 0])),
    "num_hit_tokens: a prefix hit is longer": with_result(2, LookupResult([12, 0], [0, 4])),
    "stop: no_blocks at item 2 of 2": stopped(3, 2),
    "stop: hit_changed at item 0 of 2": stopped(1, 0, HIT_CHANGED),
    "stop: a Lookup cannot be stopped": stopped(2, 0),
    "stop: .* prefix hit of 4 tokens": stopped(3, 0, HIT_CHANGED, 4),
    "stop: .* prefix hit of 12 tokens": stopped(3, 0, HIT_CHANGED, 12),
    "num_blocks: has 2 values for 1 requests": stopped(3, 1),
    "block_ids_to_zero, copies: must be empty": Outcome(5, RESULTS, None, (3,)),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_wrong_outcome_is_refused_by_its_field(problem: str) -> None:
    with pytest.raises(WrongAnswer, match=f"^{problem.strip()}"):
        OutcomeCheck(20, GROUPS).check(OPERATIONS, WRONG[problem])


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(5, RESULTS),
        Outcome(5, RESULTS[:2], Stop(1, 2 - 1, NO_BLOCKS)),
        with_result(
            3, AdmitResult((GroupBlocks([], []), GroupBlocks([], []))), Stop(3, 0, NO_BLOCKS)
        ),
        with_result(
            3,
            AdmitResult((GroupBlocks([3], [3, 4, 5]), GroupBlocks([2], [7, 8]))),
            Stop(3, 1, HIT_CHANGED, 3),
        ),
    ],
)
def test_a_right_outcome_is_taken(outcome: Outcome) -> None:
    if outcome.stop is not None and outcome.stop.operation_index == 1:
        outcome.results = (None, GrowResult((GroupBlocks([1], [1]), GroupBlocks([0], []))))
    OutcomeCheck(20, GROUPS).check(OPERATIONS, outcome)


def test_a_hit_does_not_change_to_the_same_tokens_twice() -> None:
    admit = Admit([Admission(6, 9, 4, 10, 10, 0)])
    none = AdmitResult((GroupBlocks([], []), GroupBlocks([], [])))
    changed = Outcome(5, (none,), Stop(0, 0, HIT_CHANGED, 0))
    check = OutcomeCheck(20, GROUPS)
    check.check([admit], changed)
    check.check([admit], Outcome(5, (none,), Stop(0, 0, HIT_CHANGED, 8)))
    check.check([Lookup([6], [9], [[]])], Outcome(5, (LookupResult([4], [0]),)))
    check.check([admit], changed)
    with pytest.raises(WrongAnswer, match="stop: the kvpool reports twice"):
        check.check([admit], changed)


def test_states_are_cleared_and_copied_within_the_pool() -> None:
    check = OutcomeCheck(20, MIXED)
    check.check([BeginStep()], Outcome(5, (None,), None, (3, 4), (BlockCopy(1, 3, 4),)))
    with pytest.raises(WrongAnswer, match="block_ids: a block is not from 1 to 19"):
        check.check([BeginStep()], Outcome(5, (None,), None, (3, 20)))
    with pytest.raises(WrongAnswer, match=r"copies\.group: 2"):
        check.check([BeginStep()], Outcome(5, (None,), None, (), (BlockCopy(2, 3, 4),)))
    with pytest.raises(WrongAnswer, match="block_ids: a block is not from 1 to 19"):
        check.check([BeginStep()], Outcome(5, (None,), None, (), (BlockCopy(1, 0, 4),)))


def test_events_are_of_whole_hashes_and_known_groups() -> None:
    check = OutcomeCheck(20, GROUPS)
    reset, done = [ResetPrefixCache()], Outcome(5, (ResetPrefixCacheResult(done=True),))
    stored = kvpool_pb2.BlocksStored(hashes=bytes(64), group=1)
    check.check(reset, done, [kvpool_pb2.Event(stored=stored)])
    for wrong in (
        kvpool_pb2.Event(),
        kvpool_pb2.Event(stored=kvpool_pb2.BlocksStored(hashes=bytes(33))),
        kvpool_pb2.Event(removed=kvpool_pb2.BlocksRemoved(hashes=bytes(32), group=2)),
    ):
        with pytest.raises(WrongAnswer, match="events"):
            check.check(reset, done, [wrong])


def test_the_requests_of_a_transaction_are_those_that_it_serves() -> None:
    assert requests_of(OPERATIONS) == [2, 3, 4, 5, 6, 7]
