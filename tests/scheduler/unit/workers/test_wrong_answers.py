"""A worker's answer that contradicts its step is refused, with the name of the field, and does not
become the step's output.
"""

from typing import Any

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.pool.block_hash import pack_token_ids
from services.common.pool.ids import BlockId, RequestKey
from services.common.request.pooling import Pooler, PoolingParams, PoolingTask, PoolingType
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.workers.answer_check import ModelFacts, WrongAnswer
from services.scheduler.adapters.workers.steps_in_flight import SentStep, StepsInFlight
from services.scheduler.core.engine.deadlines import Deadlines
from services.scheduler.core.kv_transfer import BlockTransfer, ConnectorLoad, KVConnectorMetadata
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request

Answer = worker_pb2.ExecuteResponse
Change = dict[str, Any]


def make_request(row: int, num_tokens: int, **fields: Any) -> Request:
    request = Request(f"r{row}", RequestKey(row), [7] * num_tokens, 5, **fields)
    request.row = row
    return request


def plan_of_four() -> SchedulerOutput:
    """A step with four requests. The first decodes, the second computes a chunk inside its prompt,
    the third has two drafts, and the fourth computes its whole prompt with log-probabilities.
    """
    plain, wanted = SamplingParams(), SamplingParams(logprobs=2, prompt_logprobs=1)
    requests = [
        make_request(0, 6, sampling=plain),
        make_request(1, 5, sampling=plain),
        make_request(2, 6, sampling=plain),
        make_request(3, 5, sampling=wanted),
    ]
    plan = SchedulerOutput(9, requests, [1, 3, 3, 5], [5, 0, 5, 0])
    plan.prefill_chunks = frozenset([requests[1]])
    plan.draft_token_ids[requests[2]] = [-1, -1]
    plan.block_tables[requests[3]] = ([BlockId(1)],)
    blocks = [BlockTransfer(BlockId(number), number, b"") for number in (4, 5)]
    plan.kv_connector_metadata = KVConnectorMetadata((), (ConnectorLoad(RequestKey(8), blocks),))
    return plan


def rows(width: int, count: int, **fields: Any) -> common_pb2.Logprobs:
    numbers = width * count
    whole = {"token_ids": [1] * numbers, "logprobs": [-0.5] * numbers, "ranks": [1] * count}
    return common_pb2.Logprobs(width=width, **(whole | fields))


def logprobs(
    index: int = 3, sampled: common_pb2.Logprobs | None = None, num_prompt: int = 4
) -> list[worker_pb2.RequestLogprobs]:
    sampled = sampled or rows(3, 1)
    return [worker_pb2.RequestLogprobs(index=index, sampled=sampled, prompt=rows(2, num_prompt))]


def ended(request: int = 8, *blocks: int) -> list[worker_pb2.EndedTierLoad]:
    return [
        worker_pb2.EndedTierLoad(request=request, invalid_block_ids=pack_token_ids(list(blocks)))
    ]


def packed(*values: int) -> bytes:
    return pack_token_ids(values)


def right_answer(**changes: Any) -> Answer:
    fields = {
        "generation": 3,
        "step": 9,
        "num_tokens": packed(1, 0, 2, 1),
        "token_ids": packed(5, 6, 7, 8),
        "num_draft_tokens": packed(0, 0, 1, 0),
        "logprobs": logprobs(),
    }
    return Answer(**(fields | changes))


def sent(
    plan: SchedulerOutput, model: ModelFacts, ranks: str = "a", num_stages: int = 1
) -> SentStep:
    steps = StepsInFlight(ranks, Deadlines(1, 10))
    steps.model, steps.num_stages = model, num_stages
    return steps.add(3, plan, 10.0)


WRONG: dict[str, Change] = {
    "it has the numbers of step 8 in generation 3": {"step": 8},
    "it has the numbers of step 9 in generation 4": {"generation": 4},
    "slack_nanos is longer than a day": {"execute_nanos": 2**63},
    "slack_nanos is longer than a day ": {"slack_nanos": 2**62},
    "7 bytes are not a whole number of int32": {"token_ids": b"1234567"},
    "num_tokens: has 3 values for 4 requests": {"num_tokens": packed(1, 0, 2)},
    "num_tokens: has 0 values for 4 requests": {"num_tokens": b"", "token_ids": b""},
    "num_tokens: is 0 for a request that must have 1 to 1": {"num_tokens": packed(0, 0, 2, 1)},
    "num_tokens: is 1 for a request that must have 0 to 0": {"num_tokens": packed(1, 1, 2, 1)},
    "num_tokens: is 3 for a request that must have 1 to 2": {"num_tokens": packed(1, 0, 3, 1)},
    "num_tokens: is 5320 for": {"num_tokens": packed(5320, 0, 2, 1)},
    "num_tokens: is -1 for": {"num_tokens": packed(-1, 0, 2, 1)},
    "num_draft_tokens: is 3 for a request with 2 drafts": {"num_draft_tokens": packed(0, 0, 3, 0)},
    "num_draft_tokens: is 1 for a request with 0 drafts": {"num_draft_tokens": packed(1, 0, 1, 0)},
    "num_draft_tokens: has values of 1 requests, not 4": {"num_draft_tokens": packed(0)},
    "token_ids: has 5 tokens, not 4": {"token_ids": packed(5, 6, 7, 8, 9)},
    "token_ids: has 3 tokens, not 4": {"token_ids": packed(5, 6, 7)},
    "token_ids: 10 is not from 0 to 9": {"token_ids": packed(5, 6, 7, 10)},
    "token_ids: -1 is not from 0 to 9": {"token_ids": packed(5, 6, -1, 8)},
    "nan_requests: an index is not that of a request of the step": {"nan_requests": packed(4)},
    "refused_tokens: an index is not that of a request of the step": {
        "refused_requests": packed(-1),
        "refused_tokens": packed(0),
    },
    "refused_tokens: has token 2": {"refused_requests": packed(0), "refused_tokens": packed(2)},
    "zip": {"refused_requests": packed(0), "refused_tokens": packed(0, 0)},
    "logprobs.ranks: has 0 rows for a request that needs 1": {"logprobs": []},
    "logprobs: has log-probabilities of a request that did not ask": {
        "logprobs": [*logprobs(), *logprobs(index=0)]
    },
    "logprobs.ranks: has 2 rows for a request that needs 1": {
        "logprobs": logprobs(sampled=rows(3, 2))
    },
    "logprobs.ranks: has 3 rows for a request that needs 4": {"logprobs": logprobs(num_prompt=3)},
    "logprobs: has another number of values": {
        "logprobs": logprobs(sampled=rows(3, 1, logprobs=[-0.5]))
    },
    "logprobs: has another number of values ": {"logprobs": logprobs(sampled=rows(2, 1))},
    "logprobs.token_ids: a token or rank is 10": {
        "logprobs": logprobs(sampled=rows(3, 1, token_ids=[1, 2, 10]))
    },
    "logprobs.token_ids: a token or rank is 20": {
        "logprobs": logprobs(sampled=rows(3, 1, ranks=[21]))
    },
    "a value that is not a log-probability": {
        "logprobs": logprobs(sampled=rows(3, 1, logprobs=[-1, float("nan"), -1]))
    },
    "ended_tier_loads: .* load of request 7": {"ended_tier_loads": ended(7)},
    "ended_tier_loads: .* load of request 8": {"ended_tier_loads": [*ended(8), *ended(8)]},
    "ended_tier_loads.invalid_block_ids": {"ended_tier_loads": ended(8, 6)},
}


@pytest.mark.parametrize("problem", WRONG)
async def test_a_wrong_answer_is_refused_by_its_field(problem: str) -> None:
    step = sent(plan_of_four(), ModelFacts(vocab_size=10))
    with pytest.raises(WrongAnswer, match=f"^its answer to step 9 is wrong: .*{problem.strip()}"):
        step.answered("a", right_answer(**WRONG[problem]))
    assert not step.output.done()


async def test_the_right_answer_is_the_output() -> None:
    step = sent(plan_of_four(), ModelFacts(vocab_size=10))
    step.answered("a", right_answer(ended_tier_loads=ended(8, 5)))
    output = step.output.result()
    assert [list(tokens) for tokens in output.token_ids] == [[5], [], [6, 7], [8]]
    assert output.kv_transfers.invalid_block_ids == [5]


async def test_ranks_that_sampled_different_tokens_are_both_wrong() -> None:
    step = sent(plan_of_four(), ModelFacts(vocab_size=10), "ab")
    step.answered("a", right_answer())
    with pytest.raises(WrongAnswer, match="token_ids: another rank has sampled other tokens"):
        step.answered("b", right_answer(token_ids=packed(5, 6, 7, 9)))


async def test_a_stage_that_does_not_sample_has_no_tokens() -> None:
    step = sent(plan_of_four(), ModelFacts(vocab_size=10), "ab", num_stages=2)
    with pytest.raises(
        WrongAnswer, match="token_ids: must be empty, because this pipeline stage does not sample"
    ):
        step.answered("a", right_answer())


def vector(index: int, size: int = 3) -> worker_pb2.PooledVector:
    return worker_pb2.PooledVector(index=index, values=bytes(4 * size))


@pytest.mark.parametrize(
    ("pooled", "problem"),
    [
        ([vector(0), vector(2, 2)], ""),
        ([vector(0)], "pooled: has vectors of other prompts"),
        ([vector(0), vector(1), vector(2, 2)], "pooled: has vectors of other prompts"),
        (
            [vector(0, 2), vector(2, 2)],
            "pooled.values: a vector has 8 bytes, not those of 3 numbers",
        ),
        ([vector(0), vector(2)], "pooled.values: a vector has 12 bytes, not those of 2 numbers"),
    ],
)
async def test_vectors_are_of_the_prompts_that_end(
    pooled: list[worker_pb2.PooledVector], problem: str
) -> None:
    plain = SamplingParams()
    requests = [make_request(row, 5, sampling=plain) for row in range(3)]
    requests[2].pooling = PoolingParams(dimensions=2)
    plan = SchedulerOutput(9, requests, [5, 3, 5], [0, 0, 0])
    plan.prefill_chunks = frozenset([requests[1]])
    pooler = Pooler(PoolingTask.EMBED, PoolingType.LAST, 3)
    step = sent(plan, ModelFacts(10, pooler))
    answer = Answer(generation=3, step=9, num_tokens=packed(0, 0, 0), pooled=pooled)
    if problem:
        with pytest.raises(WrongAnswer, match=problem):
            step.answered("a", answer)
    else:
        step.answered("a", answer)
        assert step.output.done()


async def test_whatever_a_field_holds_the_answer_is_taken_or_refused() -> None:
    """Each byte of the message is replaced by a few other values."""
    whole = right_answer(
        ended_tier_loads=ended(8, 5),
        nan_requests=packed(0),
        refused_requests=packed(2),
        refused_tokens=packed(1),
        grammar_errors=[worker_pb2.GrammarError(index=2, message="no")],
    ).SerializeToString()
    plan, model = plan_of_four(), ModelFacts(vocab_size=10)
    num_refused = 0
    for place in range(len(whole)):
        for byte in (0, 1, 0x7F, 0xFF):
            spoiled = whole[:place] + bytes([byte]) + whole[place + 1 :]
            try:
                answer = Answer.FromString(spoiled)
            except Exception:
                continue
            step = sent(plan, model)
            try:
                step.answered("a", answer)
            except WrongAnswer:
                num_refused += 1
    assert num_refused > 100
