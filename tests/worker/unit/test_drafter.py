"""The scheduler plans placeholders, and the model runner proposes the drafts for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.backends.arrays import Int32Array
from services.worker.core.errors import InvalidStep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import GREEDY, build_runner, ints

PROMPT = [7, 8, 9, 10, 11]
MOST = 4


class Scripted:
    """A proposer that returns the drafts in `next`, and records its calls in `asked`."""

    def __init__(self) -> None:
        self.next: list[int] = []
        self.asked: list[tuple[list[int], int]] = []
        self.forgotten: list[int] = []

    def propose(self, row: int, token_ids: Int32Array, most: int) -> Sequence[int]:
        assert row == 0
        self.asked.append((token_ids.tolist(), most))
        return self.next[:most]

    def forget(self, row: int) -> None:
        self.forgotten.append(row)

    def clear(self) -> None:
        self.forgotten.clear()


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


@pytest.fixture
def runner(tmp_path: Path, scripted: Scripted) -> ModelRunner:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, "llama")
    return build_runner(tmp_path, block_size=4, num_blocks=40, proposer=scripted)


def step(number: int, scheduled: int, computed: int, num_drafts: int, **changes) -> StepInput:
    return StepInput(
        1,
        number,
        ints(0),
        ints(scheduled),
        ints(computed),
        num_draft_tokens=ints(num_drafts) if num_drafts else ints(),
        draft_token_ids=ints(*[-1] * num_drafts),
        **changes,
    )


def enter(runner: ModelRunner) -> int:
    new = NewRequest(0, ints(*PROMPT), 5, GREEDY, (np.arange(1, 9, dtype=np.int32),))
    return int(runner.execute(step(1, 5, 0, 0, new_requests=(new,))).token_ids[0])


def continued(runner: ModelRunner, count: int) -> list[int]:
    """The first `count` output tokens without drafts. Removes the request at the end."""
    tokens = [enter(runner)]
    for index in range(count - 1):
        tokens.append(int(runner.execute(step(2 + index, 1, 5 + index, 0)).token_ids[0]))
    runner.execute(StepInput(1, 50, ints(), ints(), ints(), removed_rows=ints(0)))
    return tokens


def test_a_step_continues_after_the_accepted_drafts(
    runner: ModelRunner, scripted: Scripted
) -> None:
    tokens = continued(runner, 8)
    enter(runner)
    scripted.next = [tokens[1], 3, 3, 3]
    output = runner.execute(step(2, 1 + MOST, 5, MOST))
    assert output.token_ids.tolist() == tokens[1:3]
    assert output.num_draft_tokens.tolist() == [MOST]
    # The next step was planned as if all four drafts had been accepted.
    scripted.next = tokens[3:5]
    output = runner.execute(step(3, 1 + MOST, 10, MOST))
    assert output.token_ids.tolist() == tokens[3:6]
    assert output.num_draft_tokens.tolist() == [2]
    scripted.next = []
    output = runner.execute(step(4, 1 + MOST, 12, MOST))
    assert output.token_ids.tolist() == [tokens[6]]
    assert not len(output.num_draft_tokens)
    # This step has no drafts, but was planned as if the last step's four drafts were accepted.
    assert runner.execute(step(5, 1, 15, 0)).token_ids.tolist() == [tokens[7]]
    assert scripted.asked == [
        ([*PROMPT, tokens[0]], MOST),
        ([*PROMPT, *tokens[:3]], MOST),
        ([*PROMPT, *tokens[:6]], MOST),
    ]


def test_at_most_one_steps_drafts_are_subtracted_from_computed_tokens(runner: ModelRunner) -> None:
    enter(runner)
    with pytest.raises(InvalidStep, match="row 0 has 6 tokens, but its step begins after 11"):
        runner.execute(step(2, 1, 6 + MOST, 0))
    runner.execute(step(2, 1, 5 + MOST, 0))


def test_a_row_is_forgotten_with_its_request(runner: ModelRunner, scripted: Scripted) -> None:
    enter(runner)
    runner.execute(StepInput(1, 2, ints(), ints(), ints(), removed_rows=ints(0)))
    assert scripted.forgotten == [0]
