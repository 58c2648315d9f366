"""Steps that begin before the last step's tokens are on the host have the same results."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.request.sampling import SamplingParams
from services.worker.core.errors import InvalidStep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.sampled import SampledOnDevice
from services.worker.core.step import StepInput, StepOutput
from services.worker.sampling.logprobs import LogprobRows
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import GREEDY, build_runner, ints
from tests.worker.step_story import (
    DRAWN,
    PENALISED,
    WITH_LOGPROBS,
    run_plainly,
    run_two_in_flight,
    step,
    story,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, "llama")
    return tmp_path


def runner_of(model: Path, *, keeps_tokens_on_device: bool) -> ModelRunner:
    return build_runner(
        model, block_size=4, num_blocks=60, keeps_tokens_on_device=keeps_tokens_on_device
    )


def same(one: LogprobRows | None, other: LogprobRows | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.ranks.tolist() == other.ranks.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "kinds",
    [
        (GREEDY,) * 4,
        (DRAWN, GREEDY, DRAWN, DRAWN),
        (GREEDY, PENALISED, DRAWN, GREEDY),
        (DRAWN, GREEDY, WITH_LOGPROBS, PENALISED),
    ],
)
def test_two_steps_in_flight_give_the_same_tokens(
    model: Path, kinds: tuple[SamplingParams, ...]
) -> None:
    plain = run_plainly(runner_of(model, keeps_tokens_on_device=False), story(kinds))
    ahead = run_two_in_flight(runner_of(model, keeps_tokens_on_device=True), story(kinds))
    for one, other in zip(plain, ahead, strict=True):
        assert (one.generation, one.step) == (other.generation, other.step)
        assert one.num_tokens.tolist() == other.num_tokens.tolist()
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.keys() == other.logprobs.keys()
        for index, of_request in one.logprobs.items():
            same(of_request.sampled, other.logprobs[index].sampled)
            same(of_request.prompt, other.logprobs[index].prompt)


def test_a_step_is_answered_later_if_the_device_samples_any_of_it(model: Path) -> None:
    runner = runner_of(model, keeps_tokens_on_device=True)
    begun = [runner.begin(step) for step in story((PENALISED, GREEDY, PENALISED, PENALISED))[:6]]
    on_host = [
        None
        if isinstance(output, StepOutput)
        else [indexes.tolist() for indexes, _ in output.known.parts]
        for output in begun
    ]
    # Rows with penalties are sampled on the host. The greedy request, which the device samples,
    # ends before the fifth step.
    assert on_host == [[[0]], [[0]], [[0]], [[0, 1]], None, None]
    outputs = [output if isinstance(output, StepOutput) else output.wait() for output in begun]
    assert [output.num_tokens.tolist() for output in outputs[3:]] == [[1, 1, 1], [1, 1], [1, 1, 1]]


def test_log_probabilities_of_a_prompt_come_with_tokens_of_the_device(model: Path) -> None:
    runner = runner_of(model, keeps_tokens_on_device=True)
    begun = [runner.begin(step) for step in story((GREEDY, DRAWN, WITH_LOGPROBS, GREEDY))[:6]]
    pending = [output for output in begun if isinstance(output, SampledOnDevice)]
    assert pending == begun
    found = [output.wait().logprobs for output in pending]
    assert [list(of_step) for of_step in found] == [[], [], [2], [1], [], [0]]
    assert found[2][2].prompt is not None
    assert found[2][2].sampled is None
    assert found[5][0].sampled is not None
    again = pending[2].wait().logprobs
    same(again[2].prompt, found[2][2].prompt)


def test_tokens_that_only_the_device_knows_are_not_computed_again(model: Path) -> None:
    runner = runner_of(model, keeps_tokens_on_device=True)
    for begun in story((GREEDY,) * 4)[:2]:
        runner.begin(begun)
    with pytest.raises(
        InvalidStep, match=("row 0 computes tokens again whose ids only the device has")
    ):
        runner.begin(step(2, (0, 2, 5)))


def test_a_new_generation_forgets_tokens_on_the_device(model: Path) -> None:
    runner = runner_of(model, keeps_tokens_on_device=True)
    steps = story((GREEDY,) * 4)
    expected = run_two_in_flight(runner, steps)[0].token_ids.tolist()
    again = StepInput(
        2, 0, steps[0].rows, ints(5, 5), ints(0, 0), new_requests=steps[0].new_requests
    )
    assert runner.execute(again).token_ids.tolist() == expected
