"""A model runner in single steps: chunks, steps planned ahead, drafts and generations."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.request.sampling import SamplingParams
from services.worker.core.errors import InvalidStep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput, StepOutput
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import GREEDY, build_runner, ints

PROMPT = [7, 8, 9, 10, 11]
LOGPROBS = SamplingParams(temperature=0, logprobs=0)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, "llama")
    return build_runner(tmp_path, block_size=4, num_blocks=40)


def new(row: int = 0, sampling: SamplingParams = GREEDY, first_block: int = 1) -> NewRequest:
    """A new request with PROMPT and room for 24 tokens."""
    blocks = np.arange(first_block, first_block + 6, dtype=np.int32)
    return NewRequest(row, ints(*PROMPT), len(PROMPT), sampling, (blocks,))


def step(number: int, *entries: tuple[int, int, int], generation: int = 1, **changes) -> StepInput:
    """A step. Entries are (batch row, number of scheduled tokens, number of computed tokens)."""
    rows, scheduled, computed = zip(*entries, strict=True) if entries else ((), (), ())
    return StepInput(generation, number, ints(*rows), ints(*scheduled), ints(*computed), **changes)


def run_plainly(runner: ModelRunner, sampling: SamplingParams, count: int) -> list[int]:
    tokens = runner.execute(
        step(0, (3, 5, 0), new_requests=(new(3, sampling, 30),))
    ).token_ids.tolist()
    for index in range(1, count):
        tokens += runner.execute(step(index, (3, 1, 4 + index))).token_ids.tolist()
    runner.execute(step(count, removed_rows=ints(3)))
    return tokens


def test_nothing_is_sampled_inside_a_prompt(runner: ModelRunner) -> None:
    first = runner.execute(step(1, (0, 3, 0), new_requests=(new(),)))
    assert (first.num_tokens.tolist(), first.token_ids.tolist()) == ([0], [])
    last = runner.execute(step(2, (0, 2, 3)))
    assert last.num_tokens.tolist() == [1]
    assert last.token_ids.tolist() == run_plainly(runner, GREEDY, 1)


def test_outputs_are_in_the_order_of_the_steps_requests(runner: ModelRunner) -> None:
    runner.execute(step(1, (2, 5, 0), new_requests=(new(2),)))
    output = runner.execute(
        step(
            2,
            (1, 5, 0),
            (2, 1, 5),
            (0, 4, 0),
            new_requests=(new(0, first_block=10), new(1, first_block=20)),
        )
    )
    tokens = run_plainly(runner, GREEDY, 2)
    assert output.num_tokens.tolist() == [1, 1, 0]
    assert output.token_ids.tolist() == tokens


def test_a_step_that_only_removes_rows_has_an_empty_output(runner: ModelRunner) -> None:
    runner.execute(step(1, (0, 5, 0), new_requests=(new(),)))
    output = runner.execute(step(2, removed_rows=ints(0)))
    assert (output.generation, output.step) == (1, 2)
    assert len(output.num_tokens) == len(output.token_ids) == 0


def test_a_new_generation_starts_with_an_empty_batch(runner: ModelRunner) -> None:
    runner.execute(step(1, (0, 5, 0), new_requests=(new(),)))
    with pytest.raises(InvalidStep, match=r"row \[0\] is not in use"):
        runner.execute(step(2, (0, 1, 5), generation=2))
    output = runner.execute(step(3, (0, 5, 0), generation=2, new_requests=(new(),)))
    assert output.num_tokens.tolist() == [1]


def verify(runner: ModelRunner, sampling: SamplingParams, drafts: list[int]) -> StepOutput:
    runner.execute(step(10, (0, 5, 0), new_requests=(new(0, sampling),)))
    return runner.execute(
        step(
            11,
            (0, 1 + len(drafts), 5),
            num_draft_tokens=ints(len(drafts)),
            draft_token_ids=ints(*drafts),
        )
    )


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.5, seed=4)])
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_drafts_are_accepted_up_to_the_first_that_would_not_be_sampled(
    runner: ModelRunner, sampling: SamplingParams, num_right: int
) -> None:
    tokens = run_plainly(runner, sampling, 8)
    drafts = tokens[1 : 1 + num_right] + [3] * (3 - num_right)
    output = verify(runner, sampling, drafts)
    accepted = output.token_ids.tolist()
    assert output.num_tokens.tolist() == [num_right + 1]
    assert accepted == tokens[1 : 2 + num_right]
    # Rejected drafts do not change later tokens.
    rest = []
    for number in range(20, 22):
        computed = 5 + len(accepted) + len(rest)
        rest += runner.execute(step(number, (0, 1, computed))).token_ids.tolist()
    assert rest == tokens[2 + num_right : 4 + num_right]


def test_verification_returns_a_row_of_logprobs_per_token(runner: ModelRunner) -> None:
    sampling = SamplingParams(temperature=0, logprobs=2)
    tokens = run_plainly(runner, sampling, 4)
    output = verify(runner, sampling, tokens[1:3])
    rows = output.logprobs[0].sampled
    assert rows is not None
    assert rows.token_ids[:, 0].tolist() == tokens[1:4]


def test_penalties_see_accepted_drafts(runner: ModelRunner) -> None:
    sampling = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.5)
    tokens = run_plainly(runner, sampling, 6)
    assert verify(runner, sampling, tokens[1:5]).token_ids.tolist() == tokens[1:6]


def test_requests_with_and_without_drafts_share_a_step(runner: ModelRunner) -> None:
    tokens = run_plainly(runner, GREEDY, 4)
    runner.execute(step(1, (0, 5, 0), new_requests=(new(0),)))
    output = runner.execute(
        step(
            2,
            (1, 5, 0),
            (0, 3, 5),
            new_requests=(new(1, first_block=10),),
            num_draft_tokens=ints(0, 2),
            draft_token_ids=ints(tokens[1], 3),
        )
    )
    assert output.num_tokens.tolist() == [1, 2]
    assert output.token_ids.tolist() == [tokens[0], tokens[1], tokens[2]]


def test_blocks_are_zeroed_before_the_step_writes_to_them(runner: ModelRunner) -> None:
    expected = run_plainly(runner, GREEDY, 2)
    first = step(5, (0, 5, 0), new_requests=(new(),), block_ids_to_zero=ints(1, 2, 3))
    tokens = runner.execute(first).token_ids.tolist()
    tokens += runner.execute(step(6, (0, 1, 5))).token_ids.tolist()
    assert tokens == expected


def test_zeroing_a_block_clears_its_contents(runner: ModelRunner) -> None:
    runner.execute(step(1, (0, 5, 0), new_requests=(new(),)))
    found = runner.execute(step(2, (1, 1, 4), new_requests=(new(1),)))
    assert found.token_ids.tolist() == run_plainly(runner, LOGPROBS, 1)
    zeroed = step(8, (2, 1, 4), new_requests=(new(2, LOGPROBS),), block_ids_to_zero=ints(1))
    other = runner.execute(zeroed).logprobs[0].sampled
    plain = runner.execute(step(9, (3, 5, 0), new_requests=(new(3, LOGPROBS, 30),)))
    assert other is not None
    assert other.logprobs.tolist() != plain.logprobs[0].sampled.logprobs.tolist()


@pytest.mark.parametrize("block", [0, 40])
def test_zeroing_a_block_outside_the_cache_is_refused(runner: ModelRunner, block: int) -> None:
    with pytest.raises(InvalidStep, match="block_ids_to_zero"):
        runner.execute(step(1, block_ids_to_zero=ints(block)))
