"""Which positions a draft model computes, and which pairs of models are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.backends.choices import KVCacheDtype
from services.worker.build import build_worker
from services.worker.core.drafts.draft_model import DraftModel
from services.worker.core.errors import NoSpeculation
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput, StepOutput
from services.worker.core.worker import WorkerDescription
from services.worker.models.errors import ModelError
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.model import Model, ModelInput
from services.worker.parts.model import load_parts
from services.worker.parts.rank_setup import set_up_rank
from services.worker.parts.refusals import refuse_draft_model
from services.worker.platforms.cuda import CudaPlatform
from services.worker.settings import WorkerSettings
from tests.tiny_models import edit_config, save_tiny_model
from tests.worker.runner_driver import GREEDY, build_runner, ints

PROMPT = [7, 8, 9, 10, 11]
BLOCK_SIZE = 4
MOST = 4


class Watched:
    def __init__(self, model: Model) -> None:
        self._model = model
        self.calls: list[list[int]] = []

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls.append(given.positions.tolist())
        return self._model.forward(given)

    def take(self) -> list[list[int]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, "llama")
    return directory


def watched(directory: Path, draft: Path) -> tuple[ModelRunner, Watched]:
    runner = build_runner(directory, block_size=BLOCK_SIZE, num_blocks=40, draft_model=draft)
    assert runner.drafter is not None
    source = runner.drafter.source
    assert isinstance(source, DraftModel)
    source.model = model = Watched(source.model)
    return runner, model


def enter(runner: ModelRunner, row: int = 0, first_block: int = 1, computed: int = 0) -> StepOutput:
    table = np.arange(first_block, first_block + 8, dtype=np.int32)
    new = NewRequest(row, ints(*PROMPT), len(PROMPT), GREEDY, (table,))
    return runner.execute(
        StepInput(1, 1, ints(row), ints(5 - computed), ints(computed), new_requests=(new,))
    )


def step(runner: ModelRunner, computed: int, num_drafts: int, row: int = 0) -> int:
    output = runner.execute(
        StepInput(
            *(1, 2, ints(row), ints(1 + num_drafts), ints(computed)),
            num_draft_tokens=ints(num_drafts) if num_drafts else ints(),
            draft_token_ids=ints(*[-1] * num_drafts),
        )
    )
    return len(output.token_ids)


def test_after_all_drafts_are_accepted_two_tokens_are_computed_and_blocks_are_filled(
    directory: Path,
) -> None:
    runner, model = watched(directory, directory)
    enter(runner)
    assert model.take() == [[0, 1, 2, 3, 4]]
    assert step(runner, 5, MOST) == 5
    assert model.take() == [[5], [6], [7], [8]]
    assert step(runner, 10, MOST) == 5
    assert model.take() == [[9, 10], [11], [12], [13]]
    assert step(runner, 15, MOST) == 5
    # The last draft's position, 19, is computed, too, because it is the last one of its block.
    assert model.take() == [[14, 15], [16], [17], [18], [19]]
    assert step(runner, 20, MOST) == 5
    assert model.take() == [[20], [21], [22], [23]]


def test_rejected_drafts_are_written_over(directory: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", seed=1)
    runner, model = watched(directory, tmp_path)
    enter(runner)
    assert step(runner, 5, MOST) == 1
    assert model.take()[1:] == [[5], [6], [7], [8]]
    # The scheduler planned this step as if all four drafts of the step before were accepted.
    assert step(runner, 10, MOST) == 1
    assert model.take() == [[6], [7], [8], [9]]


def test_without_drafts_tokens_are_computed_once_they_fill_a_block(directory: Path) -> None:
    runner, model = watched(directory, directory)
    enter(runner)
    model.take()
    for computed in (5, 6):
        step(runner, computed, 0)
        assert model.take() == []
    step(runner, 7, 0)
    assert model.take() == [[5, 6, 7]]
    step(runner, 8, 0)
    assert model.take() == []
    assert step(runner, 9, 2) == 3
    # Both drafts were accepted. The last draft's position, 11, is the last position of its block.
    assert model.take() == [[8, 9], [10], [11]]


def test_behind_a_prefix_hit_only_the_rest_is_computed(directory: Path) -> None:
    runner, model = watched(directory, directory)
    enter(runner)
    model.take()
    enter(runner, row=1, first_block=1, computed=4)
    assert model.take() == []
    assert step(runner, 5, MOST, row=1) == 5
    assert model.take() == [[4, 5], [6], [7], [8]]


def test_a_request_that_enters_within_a_block_recomputes_the_block(directory: Path) -> None:
    # In the next turn of a client session, a request may enter with an incomplete last block.
    runner, model = watched(directory, directory)
    enter(runner, computed=3)
    assert model.take() == [[0, 1, 2, 3, 4]]


def describe(model: Path, draft: Path | None, **changes: Any) -> WorkerDescription:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    settings = WorkerSettings(
        **{"model": model, "num_blocks": 60, "max_num_seqs": 2, "max_model_len": 128},
        speculative_config=None if draft is None else json.dumps(config),
        **changes,
    )
    return build_worker(settings, "incarnation", lambda: None).description


@pytest.mark.parametrize("kept", KVCacheDtype, ids=lambda kept: kept.value)
def test_blocks_are_those_of_both_models(
    directory: Path, tmp_path: Path, kept: KVCacheDtype
) -> None:
    save_tiny_model(tmp_path, "llama", num_hidden_layers=1)
    alone, draft, both, same = (
        describe(*models, kv_cache_dtype=kept)
        for models in (
            *((directory, None), (tmp_path, None)),
            *((directory, tmp_path), (directory, directory)),
        )
    )
    assert both.bytes_per_block == alone.bytes_per_block + draft.bytes_per_block
    assert len({of.fingerprint for of in (alone, both, same)}) == 3
    assert both.fingerprint == describe(directory, tmp_path, kv_cache_dtype=kept).fingerprint


@pytest.mark.parametrize(
    ("model", "draft", "changes", "problem"),
    [
        ("llama", "llama", {"vocab_size": 300}, "vocab_size is 300, but the served model has 320"),
        ("mistral_window", "llama", {}, "every layer of this model has a sliding window"),
        ("falcon_h1", "llama", {}, "a model with recurrent layers cannot verify drafts"),
        ("llama", "gpt_neox", {}, "GPTNeoXForCausalLM has no native code"),
    ],
)
def test_incompatible_draft_models_are_refused(
    tmp_path: Path, model: str, draft: str, changes: dict[str, Any], problem: str
) -> None:
    save_tiny_model(tmp_path / "model", model)
    save_tiny_model(tmp_path / "draft", draft, **changes)
    with pytest.raises(NoSpeculation, match=f"^speculative_config: .*{problem}"):
        describe(tmp_path / "model", tmp_path / "draft")


def test_on_cuda_there_are_no_draft_models(directory: Path) -> None:
    setup = set_up_rank(WorkerSettings(model=directory), lambda: None, None)
    parts, _ = load_parts(setup, open_checkpoint(directory), None)
    refuse_draft_model(setup, parts, directory)
    with pytest.raises(NoSpeculation, match="a draft model is supported only with --device cpu"):
        refuse_draft_model(replace(setup, platform=CudaPlatform), parts, directory)


def test_a_wrong_configuration_of_a_draft_model_is_named(directory: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_config(tmp_path, num_key_value_heads=3)
    with pytest.raises(ModelError, match=f"^{tmp_path}/config.json: num_key_value_heads"):
        describe(directory, tmp_path)
