"""With pipeline stages, every kind of native model continues prompts with the tokens that
transformers computes in float32. The logits have the same bits as in a single process.

Some tests run plans of the real scheduler, with a step in flight in each stage: with chunks, with
prefix hits, and with so few blocks that requests are preempted repeatedly. Others run the steps of
a test driver: after prefix hits, with embeddings as prompts, and with log-probabilities of prompts
and outputs.
"""

from pathlib import Path

import pytest
import torch
from stepwell.common.v1 import common_pb2

from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import KernelsSetting
from services.worker.core.step import NewRequest, StepInput
from services.worker.models.errors import UnsupportedModel
from services.worker.models.pooling_config import RunnerSetting
from services.worker.models.suitability.check import check_configuration, is_native
from tests.parity.oracle import assert_served
from tests.parity.parallel.test_tensor_parallel_parity import NUM_BLOCKS, make_requests
from tests.parity.parallel.test_tensor_parallel_parity import serve as serve_every_way
from tests.parity.scheduled import Run, generate, serve, step_of
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    SAMPLED,
    SITUATIONS,
    SMALL_POOL,
    Situation,
    reference_outputs,
)
from tests.tiny_models import CACHES, TINY_MODELS, save_tiny_model
from tests.worker.runner_driver import Driver, build_runner, ints
from tests.worker.staged_runner import StagedRunner


def runs_natively(kind: str) -> bool:
    name = TINY_MODELS[kind].config_class.__name__.removesuffix("Config").removesuffix("Text")
    return is_native(f"{name}ForCausalLM")


NATIVE = [kind for kind in TINY_MODELS if runs_natively(kind)]
PREEMPTED = "preempted again and again"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


async def run_stages(
    stages: StagedRunner, num_stages: int, situation: Situation, sampling: dict[str, object]
) -> Run:
    stages.reset()
    return await serve(
        lambda plan: stages.submit(step_of(plan, num_stages)),
        stages.limits,
        situation,
        common_pb2.SamplingParams(**sampling),
        num_stages=num_stages,
    )


@pytest.mark.parametrize("kind", NATIVE)
async def test_two_stages_continue_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """Every kind is served with chunks, prefix hits and preemptions. Each kind in CACHES is also
    served in one of the other situations. Each kind that is not in CACHES has the same cache as
    one of them.
    """
    model = save_tiny_model(tmp_path, kind)
    options = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    names = [PREEMPTED]
    if kind in CACHES:
        others = [name for name in SITUATIONS if name != PREEMPTED]
        names.append(others[list(CACHES).index(kind) % len(others)])
    with StagedRunner(tmp_path, 2, **options) as stages:
        for name in names:
            situation = SITUATIONS[name]
            run = await run_stages(stages, 2, situation, GREEDY)
            assert run.outputs == situation.chosen(reference_outputs(kind)), name
            assert (run.num_preemptions > 0) == (situation.num_blocks == SMALL_POOL)
        driver = Driver(stages, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, keeps=True)
        for situation, requests in serve_every_way(driver, model.config.hidden_size).items():
            for number, request in enumerate(requests):
                assert_served(model, request, f"{situation}: request {number}")


@pytest.mark.parametrize(
    ("kind", "num_stages", "ranks_per_stage", "num_layers"),
    [("llama_tied", 3, 1, 4), ("gemma3", 3, 1, 6), ("qwen3", 2, 2, 3), ("mixtral", 2, 2, 3)],
)
async def test_more_stages_and_ranks_in_each(
    kind: str, num_stages: int, ranks_per_stage: int, num_layers: int, tmp_path: Path
) -> None:
    """The stages have unequal numbers of layers, or lack the layers of some KV-cache group."""
    save_tiny_model(tmp_path, kind, num_hidden_layers=num_layers)
    greedy, sampled = common_pb2.SamplingParams(**GREEDY), common_pb2.SamplingParams(**SAMPLED)
    options = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS}
    whole = build_runner(tmp_path, **options)
    with StagedRunner(tmp_path, num_stages, ranks_per_stage=ranks_per_stage, **options) as stages:
        for situation in (SITUATIONS["chunks of 11"], SITUATIONS[PREEMPTED]):
            run = await run_stages(stages, num_stages, situation, GREEDY)
            alone = await generate(whole, situation, greedy, async_scheduling=False)
            assert run.outputs == alone.outputs
            if ranks_per_stage == 1:  # with several ranks, sums are rounded differently
                run = await run_stages(stages, num_stages, situation, SAMPLED)
                alone = await generate(whole, situation, sampled, async_scheduling=False)
                assert run.outputs == alone.outputs


@pytest.mark.parametrize("kernels", [KernelsSetting.AUTO, KernelsSetting.TORCH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_same_bits_as_in_one_process(
    dtype: torch.dtype, kernels: KernelsSetting, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, "gemma2", num_hidden_layers=4, dtype=dtype)
    options = {"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "dtype": dtype}
    served = []
    with StagedRunner(tmp_path, 2, kernels_setting=kernels, **options) as stages:
        for runner in (stages, build_runner(tmp_path, kernels_setting=kernels, **options)):
            requests = make_requests()
            for request in requests:
                request.sampling = SamplingParams(temperature=0, logprobs=5, prompt_logprobs=5)
            driver = Driver(runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
            driver.run(requests, chunk=7)
            served.append(requests)
    for staged, alone in zip(*served, strict=True):
        assert staged.output == alone.output
        for ours, theirs in zip(
            [*staged.prompt_rows, *staged.sampled_rows],
            [*alone.prompt_rows, *alone.sampled_rows],
            strict=True,
        ):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert ours.logprobs.tolist() == theirs.logprobs.tolist()


def test_steps_run_in_all_stages_at_once(tmp_path: Path) -> None:
    """The first stage runs a step while the second stage has not begun the step before."""
    save_tiny_model(tmp_path, "llama")
    with StagedRunner(tmp_path, 2, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS) as stages:
        first, second = (prompt_step(number, row=number) for number in range(2))
        for step in (first, second):
            done = stages.submit_to(0, step).result(10)
            assert not len(done.token_ids)
        for step in (first, second):
            assert len(stages.submit_to(1, step).result(10).token_ids) == 1


def test_what_stages_cannot_divide_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "llama", "llama")
    with pytest.raises(UnsupportedModel, match="2 layers cannot be divided into 3 stages"):
        check_configuration(tmp_path / "llama", num_stages=3)
    with pytest.raises(UnsupportedModel, match="a pooling model cannot be divided into pipeline"):
        check_configuration(tmp_path / "llama", num_stages=2, runner=RunnerSetting.POOLING)
    save_tiny_model(tmp_path / "opt", "opt")
    with pytest.raises(UnsupportedModel, match="OPTForCausalLM has no native code"):
        check_configuration(tmp_path / "opt", num_stages=2)


def prompt_step(number: int, row: int) -> StepInput:
    entering = NewRequest(row, ints(5, 6, 7, 8), 4, SamplingParams(), (ints(row + 1),))
    return StepInput(
        generation=1,
        step=number,
        rows=ints(row),
        num_scheduled_tokens=ints(4),
        num_computed_tokens=ints(0),
        new_requests=(entering,),
        last_token_ids=ints(8),
    )
