"""How layers are divided into pipeline stages, and steps that only some stages received."""

import time
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from services.common.errors import Aborted
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.core.errors import InvalidStep
from services.worker.core.step import NewRequest, StepInput
from services.worker.models.config import read_model_config
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.checkpoint import open_checkpoint
from services.worker.models.stage import StageLayers, divide_layers, layers_of_stage
from services.worker.models.weights import load_weights
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.group import Timeouts
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import GREEDY, ints
from tests.worker.staged_runner import StagedRunner


@pytest.mark.parametrize(
    ("layer_bytes", "head_bytes", "num_stages", "expected"),
    [
        ([1] * 30, 8, 2, [19, 11]),  # the output head has the bytes of eight layers
        ([2] * 22, 3, 2, [12, 10]),
        ([1] * 4, 0, 3, [2, 1, 1]),
        ([1] * 7, 0, 3, [3, 3, 1]),
        ([1] * 3, 100, 3, [1, 1, 1]),
        ([5, 1, 1, 1, 5], 0, 2, [3, 2]),
        ([4, 4, 1, 1, 1, 1], 0, 3, [1, 1, 4]),
        ([9], 5, 1, [1]),
    ],
)
def test_the_stage_with_the_most_bytes_has_as_few_as_possible(
    layer_bytes: list[int], head_bytes: int, num_stages: int, expected: list[int]
) -> None:
    divided = divide_layers(layer_bytes, head_bytes, num_stages)
    assert [len(layers) for layers in divided] == expected
    assert [layer for layers in divided for layer in layers] == list(range(len(layer_bytes)))


def test_no_other_division_has_a_lighter_heaviest_stage() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        sizes = torch.randint(1, 30, (7,), generator=generator).tolist()
        head = int(torch.randint(0, 60, (), generator=generator))

        def heaviest(ends: list[int], sizes: list[int] = sizes, head: int = head) -> int:
            parts = [sum(sizes[a:b]) for a, b in pairwise(ends)]
            return max(*parts[:-1], parts[-1] + head)

        every = [[0, a, b, 7] for a in range(1, 6) for b in range(a + 1, 7)]
        divided = divide_layers(sizes, head, 3)
        assert heaviest([0, *(layers.stop for layers in divided)]) == min(map(heaviest, every))


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_counts_whether_it_is_tied_or_not(tied: bool, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_hidden_layers=5, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(tmp_path)
    stages = [layers_of_stage(checkpoint, 5, stage, 2) for stage in range(2)]
    assert stages == [StageLayers(0, 3, 5), StageLayers(3, 5, 5)]
    assert layers_of_stage(checkpoint, 5, 0, 1).is_whole
    with pytest.raises(UnsupportedModel, match="pipeline_parallel_size may be 5 or less"):
        layers_of_stage(checkpoint, 5, 0, 6)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    save_tiny_model(tmp_path, "llama_tied", num_hidden_layers=3)
    return tmp_path


@pytest.fixture
def stages(directory: Path) -> Iterator[StagedRunner]:
    with StagedRunner(directory, 3, block_size=4, num_blocks=50) as running:
        yield running


def prompt_of(generation: int, number: int) -> StepInput:
    tokens = ints(5, 6, 7, 8)
    return StepInput(
        generation,
        number,
        ints(number),
        ints(4),
        ints(0),
        new_requests=(NewRequest(number, tokens, 4, GREEDY, (ints(number + 1),)),),
        last_token_ids=tokens[-1:],
    )


def opening(generation: int) -> StepInput:
    """The empty step with which a generation (a new, empty batch) begins."""
    return StepInput(generation, 0, ints(), ints(), ints())


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_reads_its_own_layers_only(
    tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "llama", num_hidden_layers=3, tie_word_embeddings=tied)
    config, checkpoint = read_model_config(tmp_path), open_checkpoint(tmp_path)
    embedding, norm = 320 * 48 * 4, 48 * 4
    layer = (48 * 48 * 2 + 24 * 48 * 2 + 96 * 48 * 3) * 4 + 2 * norm
    assert checkpoint.num_bytes == 3 * layer + (1 if tied else 2) * embedding + norm
    held, caplog_lines = [], []
    for index, num_bytes in enumerate([embedding + layer, layer, layer + norm + embedding]):
        with caplog.at_level("INFO"):
            weights = load_weights(
                config,
                checkpoint,
                torch.float32,
                TorchKernels(),
                lambda *_: None,
                stage=StageLayers(index, index + 1, 3),
            )
        held.append((len(weights.embedding), len(weights.layers), weights.head is not None))
        own, whole = num_bytes / 2**20, checkpoint.num_bytes / 2**20
        layers = f"this stage has layers {index} to {index} of 3"
        line = f"{layers}: read {own:.1f} of {whole:.1f} MiB of the weights"
        caplog_lines.append(line in caplog.messages)
    assert held == [(320, 1, False), (0, 1, False), (0, 1, True)]
    assert all(caplog_lines), caplog.messages


def test_hidden_states_of_a_generation_that_is_over_are_dropped(stages: StagedRunner) -> None:
    # The next two steps are sent only to the first stage.
    expected = stages.execute(prompt_of(1, 0)).token_ids.tolist()
    for number in (1, 2):
        stages.submit_to(0, prompt_of(1, number)).result(10)
    stages.execute(opening(2))
    assert stages.execute(prompt_of(2, 1)).token_ids.tolist() == expected


def test_a_step_that_the_previous_stage_was_not_sent_is_refused(stages: StagedRunner) -> None:
    expected = stages.execute(prompt_of(1, 0)).token_ids.tolist()
    waiting = [stages.submit_to(rank, prompt_of(1, 1)) for rank in (1, 2)]
    assert not wait(waiting, 0.2).done
    stages.submit_each(opening(2))
    for step in waiting:
        with pytest.raises(Aborted, match="step 1 belongs to generation 1, which has ended"):
            step.result(10)
    assert stages.execute(prompt_of(2, 1)).token_ids.tolist() == expected


def test_stages_that_were_sent_different_steps_refuse_them(stages: StagedRunner) -> None:
    expected = stages.execute(prompt_of(1, 0)).token_ids.tolist()
    stages.submit_to(0, prompt_of(1, 1)).result(10)
    with pytest.raises(InvalidStep, match="to the previous pipeline stage: step 1 with 4 token"):
        stages.submit_to(1, prompt_of(1, 2)).result(10)
    stages.execute(opening(2))
    sent = [prompt_of(2, 1), prompt_of(2, 1)]
    for digest, step in enumerate(sent):
        step.digest = digest
    stages.submit_to(0, sent[0]).result(10)
    with pytest.raises(InvalidStep, match="a different step to the previous pipeline stage"):
        stages.submit_to(1, sent[1]).result(10)
    stages.execute(opening(3))
    assert stages.execute(prompt_of(3, 1)).token_ids.tolist() == expected
    assert not any(broken.done() for broken in stages.broken)


def test_a_stage_that_waits_for_too_long_ends_the_group(directory: Path) -> None:
    timeouts = Timeouts(join_seconds=20, collective_seconds=1)
    with StagedRunner(directory, 2, timeouts=timeouts, block_size=4, num_blocks=50) as stages:
        stages.execute(opening(1))
        time.sleep(1.2)  # without a step a stage does not wait
        stages.execute(prompt_of(1, 1))
        with pytest.raises(GroupBroken, match="step 2 failed on rank 1"):
            stages.submit_to(1, prompt_of(1, 2)).result(20)


def test_a_stage_that_ends_ends_the_others(directory: Path) -> None:
    timeouts = Timeouts(join_seconds=20, collective_seconds=2)
    with StagedRunner(directory, 3, timeouts=timeouts, block_size=4, num_blocks=50) as stages:
        waiting = stages.submit_to(2, prompt_of(1, 0))
        stages.groups[0].close()
        for rank in (1, 2):
            # The message of rank 2 may be "rank 1 has ended: rank 0 has ended".
            assert "rank 0 has ended" in str(stages.broken[rank].result(1.5))
        with pytest.raises(GroupBroken):
            waiting.result(30)


def test_features_that_stages_do_not_support_are_refused_by_name(stages: StagedRunner) -> None:
    drafts = StepInput(1, 0, ints(), ints(), ints(), draft_token_ids=ints(5))
    with pytest.raises(InvalidStep, match="num_draft_tokens: drafts are not verified by pipeline"):
        stages.submit_to(0, drafts).result(10)
    unknown = prompt_of(1, 0)
    unknown = StepInput(
        1, 0, unknown.rows, unknown.num_scheduled_tokens, ints(0), new_requests=unknown.new_requests
    )
    with pytest.raises(InvalidStep, match="last_token_ids: a pipeline stage that does not sample"):
        stages.submit_to(0, unknown).result(10)
