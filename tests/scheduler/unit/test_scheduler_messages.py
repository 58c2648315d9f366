"""Pool transactions and steps are the same after encoding as protobuf messages and decoding."""

import random

from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import BlockHash, pack_token_ids, unpack_token_ids
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.operations import (
    Admission,
    Admit,
    Commit,
    Grow,
    Lookup,
    Operation,
    Outcome,
    Release,
    ResetPrefixCache,
    Stop,
    StopReason,
)
from services.common.pool.operations_proto import (
    operation_to_proto,
    operations_from_proto,
    outcome_from_proto,
    outcome_to_proto,
)
from services.common.request.sampling import SamplingParams
from services.kvpool.core.kv_pool import KVPool
from services.kvpool.core.pool_config import PoolConfig
from services.scheduler.adapters.workers.converters import (
    model_runner_output_from_proto,
    scheduler_output_to_proto,
)
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from tests.scheduler.story import Story, prompt

HASHES = [BlockHash(bytes([number]) * 32) for number in range(4)]


def over_the_wire(core: KVPool, *operations: Operation) -> Outcome:
    """Executes a transaction, encoding and decoding its operations and its outcome."""
    asked = kvpool_pb2.TransactRequest(operations=map(operation_to_proto, operations))
    received = kvpool_pb2.TransactRequest.FromString(asked.SerializeToString())
    outcome = core.transact(operations_from_proto(received.operations))
    answer = outcome_to_proto(outcome, 7, 1)
    return outcome_from_proto(kvpool_pb2.TransactResponse.FromString(answer.SerializeToString()))


def make_core(num_blocks: int, num_groups: int = 1) -> KVPool:
    groups = (KVCacheGroup(AttentionType.FULL, 4),) * num_groups
    return KVPool(PoolConfig(num_blocks=num_blocks, groups=groups))


def admission(key: int, num_tokens: int, **fields: int) -> Admission:
    terms = {
        "max_hit_tokens": num_tokens - 1,
        "num_hit_tokens": 0,
        "num_slots": num_tokens,
        "num_commit_tokens": num_tokens,
        "num_reserve_slots": num_tokens,
        "num_watermark_blocks": 0,
    }
    return Admission(request=key, **terms | fields)


def test_one_story_of_a_pool_told_in_messages() -> None:
    core = make_core(8)
    asked = over_the_wire(core, Lookup([1, 2], [8, 3], [HASHES[:2], HASHES[:1]]))
    assert (asked.hits, asked.num_free_blocks) == ([(0, 0), (0, 0)], 7)
    first = over_the_wire(core, Admit([admission(1, 9), admission(2, 4, num_hit_tokens=0)]))
    assert first.admitted == [([1, 2, 3],), ([4],)]
    assert first.stop is None
    grown = over_the_wire(core, Grow([1, 2], [9, 4], [12, 9]))
    assert (grown.grown, grown.num_free_blocks) == ([([],), ([5, 6],)], 1)
    stopped = over_the_wire(core, Grow([2, 1], [9, 9], [10, 24]))
    assert stopped.stop == Stop(0, 1, StopReason.NO_BLOCKS)
    assert stopped.grown == [([],)]
    committed = over_the_wire(
        core, Commit([1], [12], [HASHES[2:3]]), Release([2]), Lookup([3], [11], [HASHES[:3]])
    )
    assert (committed.hits, committed.num_free_blocks) == ([(8, 0)], 4)
    changed = over_the_wire(core, Admit([admission(3, 12)]))
    assert changed.stop == Stop(0, 0, StopReason.HIT_CHANGED, 8)
    assert not over_the_wire(core, ResetPrefixCache()).reset_done
    assert over_the_wire(core, Release([1, 3]), ResetPrefixCache()).reset_done
    core.check()


def test_an_admission_travels_whole() -> None:
    item = Admission(
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        traceparent="00-a-b-01",
        resumed=True,
        num_external_tokens=8,
        num_blocks_kept_free=9,
        holds_blocks=True,
    )
    assert operation_to_proto(Admit([item])).admit.admissions[0] == kvpool_pb2.Admission(
        request=1,
        max_hit_tokens=2,
        num_hit_tokens=3,
        num_slots=4,
        num_commit_tokens=5,
        num_reserve_slots=6,
        num_watermark_blocks=7,
        traceparent="00-a-b-01",
        resumed=True,
        num_external_tokens=8,
        num_blocks_kept_free=9,
        holds_blocks=True,
    )


def test_tables_of_several_groups_are_told_apart() -> None:
    core = make_core(10, num_groups=2)
    over_the_wire(core, Lookup([1, 2], [8, 3], [HASHES[:2], []]))
    outcome = over_the_wire(core, Admit([admission(1, 5), admission(2, 3)]))
    assert outcome.admitted == [([1, 2], [3, 4]), ([5], [6])]


class WirePool:
    """A `KVPool` that encodes and decodes all operations and outcomes. Compares the outcomes with
    the outcomes of an in-process pool.
    """

    def __init__(self, core: KVPool, twin: InProcessPool) -> None:
        self._core = core
        self._twin = twin

    async def transact(self, operations: list[Operation], traceparent: str = "") -> Outcome:
        expected = await self._twin.transact(operations, traceparent)
        outcome = over_the_wire(self._core, *operations)
        assert outcome == expected
        return outcome


async def test_a_busy_replica_hears_the_same_in_process_and_in_bytes() -> None:
    story = Story(
        num_blocks=14, max_num_batched_tokens=16, through=lambda twin: WirePool(make_core(14), twin)
    )
    rng = random.Random(5)
    for number in range(12):
        shared = prompt(4 * rng.randrange(3), 100)
        story.add(
            f"r{number}", shared + prompt(rng.randrange(1, 8), 300 + 50 * number), max_tokens=9
        )
        await story.step()
    await story.run()
    assert story.scheduler.num_preemptions > 0


def request_in_row(row: int, token_ids: list[int]) -> Request:
    request = Request(
        f"r{row}",
        row,
        token_ids,
        len(token_ids) - 1,
        SamplingParams(seed=row, temperature=0, max_tokens=9),
    )
    request.row = row
    return request


def test_a_step_is_a_difference_to_the_workers_batch() -> None:
    new, old = request_in_row(2, [10, 11, 12]), request_in_row(5, [20])
    plan = SchedulerOutput(
        step=9,
        requests=[old, new],
        num_scheduled_tokens=[1, 3],
        num_computed_tokens=[7, 0],
        block_tables={new: ([1, 2], [3, 4])},
        appended_blocks={old: ([6], [7, 8])},
        removed_rows=[1, 2],
    )
    message = scheduler_output_to_proto(plan, 4, "trace")
    assert (message.generation, message.step, message.traceparent) == (4, 9, "trace")
    assert unpack_token_ids(message.removed_rows) == [1, 2]
    assert unpack_token_ids(message.rows) == [5, 2]
    assert unpack_token_ids(message.num_scheduled_tokens) == [1, 3]
    assert unpack_token_ids(message.num_computed_tokens) == [7, 0]
    (entered,) = message.new_requests
    assert (entered.row, entered.num_prompt_tokens) == (2, 2)
    assert unpack_token_ids(entered.token_ids) == [10, 11, 12]
    assert entered.sampling.seed == 2
    assert [unpack_token_ids(table.block_ids) for table in entered.block_tables] == [[1, 2], [3, 4]]
    told = [
        [unpack_token_ids(part) for part in (group.rows, group.num_blocks, group.block_ids)]
        for group in message.appended_blocks
    ]
    assert told == [[[5], [1], [6]], [[5], [2], [7, 8]]]


def test_a_decoding_request_costs_twelve_bytes() -> None:
    def step(count: int) -> int:
        requests = [request_in_row(row, [1]) for row in range(count)]
        ones = [1] * count
        plan = SchedulerOutput(1, requests, ones, ones)
        return len(scheduler_output_to_proto(plan, 1, "").SerializeToString())

    assert (step(100) - step(50)) / 50 <= 12.5


def test_what_came_of_a_step_is_told_by_request() -> None:
    logprobs = worker_pb2.RequestLogprobs(
        index=2, sampled=common_pb2.Logprobs(width=1, token_ids=[7], logprobs=[-0.5], ranks=[1])
    )
    output = model_runner_output_from_proto(
        worker_pb2.ExecuteResponse(
            num_tokens=pack_token_ids([1, 0, 2]),
            token_ids=pack_token_ids([5, 6, 7]),
            logprobs=[logprobs],
            nan_requests=pack_token_ids([1]),
        )
    )
    assert [list(tokens) for tokens in output.token_ids] == [[5], [], [6, 7]]
    assert output.logprobs == {2: logprobs}
    assert output.nan_requests == {1}


def test_a_refused_token_is_left_out_with_those_behind_it() -> None:
    output = model_runner_output_from_proto(
        worker_pb2.ExecuteResponse(
            num_tokens=pack_token_ids([1, 3, 1]),
            token_ids=pack_token_ids([5, 6, 7, 0, 0]),
            refused_requests=pack_token_ids([1, 2]),
            refused_tokens=pack_token_ids([2, 0]),
            grammar_errors=[worker_pb2.GrammarError(index=1, message="too many states")],
        )
    )
    assert [list(tokens) for tokens in output.token_ids] == [[5], [6, 7], []]
    assert output.refused_tokens == {1: 2, 2: 0}
    assert output.grammar_errors == {1: "too many states"}
