"""Steps that are begun before the tokens of the step ahead are on the host give the same tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.sampling import SamplingParams
from services.worker.core.device_tokens import PendingOutput
from services.worker.core.errors import InvalidStep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import StepInput
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
    """Log-probabilities of the same tokens, but for rounding."""
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


def test_plain_steps_are_answered_later_and_others_at_once(model: Path) -> None:
    runner = runner_of(model, keeps_tokens_on_device=True)
    begun = [runner.begin(step) for step in story((GREEDY, DRAWN, WITH_LOGPROBS, GREEDY))[:6]]
    later = [isinstance(output, PendingOutput) for output in begun]
    # The third and the fourth bring log-probabilities of a prompt, the sixth of a sampled token.
    assert later == [True, True, False, False, True, True]
    assert isinstance(begun[5], PendingOutput)
    assert begun[5].wait().logprobs.keys() == {0}


def test_tokens_that_only_the_device_knows_are_not_computed_again(model: Path) -> None:
    runner = runner_of(model, keeps_tokens_on_device=True)
    for begun in story((GREEDY,) * 4)[:2]:
        runner.begin(begun)
    with pytest.raises(InvalidStep, match="row 0 computes tokens again that it has sampled"):
        runner.begin(step(2, (0, 2, 5)))


def test_a_new_generation_forgets_what_was_ahead(model: Path) -> None:
    runner = runner_of(model, keeps_tokens_on_device=True)
    steps = story((GREEDY,) * 4)
    expected = run_two_in_flight(runner, steps)[0].token_ids.tolist()
    again = StepInput(
        2, 0, steps[0].rows, ints(5, 5), ints(0, 0), new_requests=steps[0].new_requests
    )
    assert runner.execute(again).token_ids.tolist() == expected
