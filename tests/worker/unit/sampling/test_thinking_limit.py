"""`thinking_budget` forces the end mark when reasoning has its maximum number of tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.errors import InvalidArgument
from services.common.request.sampling import SamplingParams
from services.common.request.thinking_budget import ThinkingBudget
from services.worker.sampling.edits import ThinkingLimit, logit_edits
from services.worker.sampling.sampler import Sampler
from tests.worker.unit.sampling.test_sampling_edits import greedy_tokens

START, END = (1, 2), (3, 4)
THOUGHT, CONTENT = 5, 6


def forced(budget: ThinkingBudget, *output: int) -> int | None:
    logits = np.zeros(8, dtype=np.float32)
    ThinkingLimit(budget, np.array(output, dtype=np.int32)).apply(logits)
    [left] = np.nonzero(np.isfinite(logits))
    return int(left[0]) if len(left) == 1 else None


@pytest.mark.parametrize(
    ("inside", "most", "output", "expected"),
    [
        (True, 0, (), 3),
        (True, 2, (5,), None),
        (True, 2, (5, 5), 3),
        (True, 2, (5, 5, 3), 4),  # the second token of the end mark follows the first
        (True, 2, (5, 3), 4),  # the model has sampled the first token of the end mark
        (True, 3, (5, 3), None),
        (True, 2, (5, 5, 3, 4), None),  # the reasoning is over
        (True, 2, (5, 5, 3, 4, 6, 6, 6), None),
        (True, 2, (3, 4, 6, 1, 2, 5), None),  # tokens of all parts of reasoning are added up
        (True, 2, (5, 3, 4, 6, 1, 2, 5), 3),
        (False, 1, (), None),
        (False, 1, (6, 6, 6, 1), None),
        (False, 0, (1, 2), 3),
        (False, 1, (1, 1, 2, 5), 3),
    ],
)
def test_the_end_mark_follows_after_so_many_tokens(
    inside: bool, most: int, output: tuple[int, ...], expected: int | None
) -> None:
    assert forced(ThinkingBudget(most, START, END, inside), *output) == expected


def test_a_request_that_comes_back_with_its_output_goes_on_as_it_would_have() -> None:
    rows = [[0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 1.0, 0.0]] * 9
    params = SamplingParams(temperature=0, thinking_budget=ThinkingBudget(3, START, END, True))
    whole = greedy_tokens(params, rows, [7])
    assert whole == [5, 5, 5, 3, 4, 5, 5, 5, 5]
    for cut in range(len(whole)):
        sampler = Sampler(1, 8)
        sampler.add(0, params, np.array([7, *whole[:cut]], np.int32), 1)
        again = [
            int(sampler.sample(torch.tensor([row]), np.array([0])).token_ids[0])
            for row in rows[cut:]
        ]
        assert whole[:cut] + again == whole


def test_the_mark_is_sampled_whatever_other_parameters_ban() -> None:
    budget = ThinkingBudget(0, START, END, True)
    for banning in (
        SamplingParams(allowed_token_ids=(5, 6)),
        SamplingParams(bad_words=((3,), (4,))),
        SamplingParams(logit_bias_token_ids=(3,), logit_bias_values=(-100.0,), min_p=0.5),
    ):
        params = replace(banning, temperature=0, thinking_budget=budget)
        assert greedy_tokens(params, [[0.0] * 8] * 2, [7]) == [3, 4]


def test_requests_without_a_budget_have_no_edit() -> None:
    assert logit_edits(SamplingParams(), np.array([7], np.int32), 1) == ()


@pytest.mark.parametrize(
    ("budget", "field"),
    [
        (ThinkingBudget(-1, START, END), "num_tokens"),
        (ThinkingBudget(2**31, START, END), "num_tokens"),
        (ThinkingBudget(1, (), END), "start_token_ids"),
        (ThinkingBudget(1, START, ()), "end_token_ids"),
        (ThinkingBudget(1, START, (8,)), "end_token_ids"),
        (ThinkingBudget(1, START, (3,) * 65), "end_token_ids"),
    ],
)
def test_a_wrong_budget_is_refused(budget: ThinkingBudget, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        SamplingParams(thinking_budget=budget).validate(8)
    assert refused.value.field == f"thinking_budget.{field}"
