"""A simulated model in pipeline stages, with quantized weights, and with a draft model."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.request.sampling import SamplingParams
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.worker import Worker
from services.worker.models.errors import UnsupportedModel
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.options.simulated.model import SimulatedModel
from services.worker.options.simulated.runner import TimedRunner
from services.worker.parallel.group import Group
from services.worker.parallel.membership import Membership
from tests.tiny_models import edit_config
from tests.worker.options.simulated.simulated_worker import (
    build,
    model_runner,
    oracle_of,
    save_configuration,
    save_draft,
    save_profile,
    timed_model,
)
from tests.worker.rank_threads import TIMEOUTS, free_port
from tests.worker.runner_driver import ints
from tests.worker.step_story import new, step

PROMPT = [7, 8, 9, 10, 11]
LIMITS: dict[str, Any] = {"block_size": 4, "num_blocks": 60, "max_model_len": 64}
NO_BLOCKS: dict[str, Any] = {"num_blocks": None, "max_num_batched_tokens": 64}
HARDWARE = """
[hardware]
memory_bytes = 5_000_000
bandwidth_bytes_per_second = 1e9
operations_per_second = 1e15
bandwidth_efficiency = 1
compute_efficiency = 1
seconds_per_step = 0
"""
GREEDY = SamplingParams(temperature=0)


class Stages:
    """A simulated worker for each pipeline stage, each in a separate thread."""

    def __init__(self, directory: Path, num_stages: int, num_ranks: int = 1, **settings: Any):
        size, port = num_stages * num_ranks, free_port()
        if "profile" not in settings:
            settings["profile"] = save_profile(directory)
        self._threads = [ThreadPoolExecutor(1) for _ in range(size)]

        def join(rank: int) -> tuple[Group, Worker]:
            own = Membership(rank, size, "127.0.0.1", port, num_stages)
            group = Group(own, TIMEOUTS, lambda _: None, lambda: None)
            sizes = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_ranks}
            return group, build(directory, group=group, **sizes, **settings)

        joining = [thread.submit(join, rank) for rank, thread in enumerate(self._threads)]
        self._groups, self.workers = zip(*(each.result() for each in joining), strict=True)

    def execute(self, one: Any) -> StepOutput:
        running = [
            thread.submit(worker.runner.execute, one)
            for thread, worker in zip(self._threads, self.workers, strict=True)
        ]
        return [each.result() for each in running][-1]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for group in self._groups:
            group.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of five layers without weights, with two KV-cache groups."""
    torch.set_num_threads(1)
    save_configuration(tmp_path, "gemma2")
    return tmp_path


def answer(run: Callable[[StepInput], StepOutput], count: int) -> list[int]:
    """The first `count` output tokens after PROMPT. Each decode step computes the last one."""
    tokens = [PROMPT[-1]]
    for number in range(count):
        start = (0, 1, 4 + number) if number else (0, 5, 0)
        entering = () if number else (new(0, GREEDY, num_groups=2),)
        last = ints(tokens[-1])
        output = run(step(number, start, new_requests=entering, last_token_ids=last))
        tokens += output.token_ids.tolist()
    return tokens[1:]


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(2, 1), (4, 1), (2, 2)])
def test_the_answer_does_not_depend_on_the_number_of_stages(
    directory: Path, num_stages: int, num_ranks: int
) -> None:
    alone = build(directory, **LIMITS)
    expected = oracle_of(alone).continuation(PROMPT, 6)
    assert answer(alone.runner.execute, 6) == expected
    with closing(Stages(directory, num_stages, num_ranks, **LIMITS)) as stages:
        assert answer(stages.execute, 6) == expected
        sizes = {worker.description.bytes_per_block for worker in stages.workers}
        assert max(sizes) < alone.description.bytes_per_block


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_wrong_block_in_any_stage_changes_the_answer(directory: Path, stage: int) -> None:
    expected = oracle_of(build(directory, **LIMITS)).continuation(PROMPT, 2)
    with closing(Stages(directory, 3, **LIMITS)) as stages:

        def run(one: StepInput) -> StepOutput:
            if one.step == 1:  # overwrite the first block of the first KV-cache group
                planes = model_runner(stages.workers[stage]).attention.planes
                planes[:, 1] = planes[:, 40]
            return stages.execute(one)

        tokens = answer(run, 2)
    assert tokens[0] == expected[0]
    assert tokens[1] != expected[1]


def test_each_stage_takes_its_time_after_the_one_before(directory: Path) -> None:
    profile = save_profile(directory, "kv_cache_memory_bytes = 4_000_000\n[mixed]\nseconds = 0.05")
    with closing(Stages(directory, 2, profile=profile, **LIMITS)) as stages:
        began = time.perf_counter()
        answer(stages.execute, 1)
        assert time.perf_counter() - began >= 0.1


def test_stages_divide_the_weights_of_a_computed_profile(directory: Path) -> None:
    profile = save_profile(directory, HARDWARE)
    whole = model_of(build(directory, profile=profile, **LIMITS)).size
    with closing(Stages(directory, 2, profile=profile, **LIMITS)) as stages:
        first, last = (model_of(worker).size for worker in stages.workers)
    assert first.read_bytes + last.read_bytes == whole.read_bytes
    assert first.kv_bytes_per_token + last.kv_bytes_per_token == whole.kv_bytes_per_token
    with pytest.raises(UnsupportedModel, match="cannot be divided into 5 stages"):
        Stages(directory, 5, **LIMITS)


def model_of(worker: Worker) -> SimulatedModel:
    model = timed_model(worker).model
    assert isinstance(model, SimulatedModel)
    return model


@pytest.mark.parametrize("setting", [QuantizationSetting.INT8, QuantizationSetting.W8A8])
def test_weights_in_eight_bits_are_read_four_times_as_fast_and_leave_more_memory(
    directory: Path, setting: QuantizationSetting
) -> None:
    """Unquantized weights have 32 bits. The embedding stays unquantized."""
    profile = save_profile(directory, HARDWARE)
    plain, quantized = (
        build(directory, profile=profile, quantization=each, **LIMITS | NO_BLOCKS)
        for each in (QuantizationSetting.AUTO, setting)
    )
    own, eighth = model_of(plain).size, model_of(quantized).size
    assert eighth.read_bytes * 4 == own.read_bytes
    assert timed_model(plain).times.seconds(ints(1), ints(0)) == pytest.approx(
        4 * timed_model(quantized).times.seconds(ints(1), ints(0)), rel=0.01
    )
    saved = 0.75 * own.read_bytes / plain.description.bytes_per_block
    more = quantized.description.num_blocks - plain.description.num_blocks
    assert abs(more - saved) <= 1
    assert answer(quantized.runner.execute, 3) == answer(plain.runner.execute, 3)


def test_weights_that_are_stored_in_four_bits_stay_so(directory: Path) -> None:
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True}
    edit_config(directory, quantization_config=stored)
    sizes = [
        model_of(build(directory, quantization=each, **LIMITS)).size
        for each in (QuantizationSetting.AUTO, QuantizationSetting.INT8)
    ]
    assert sizes[0].read_bytes > sizes[1].read_bytes  # by the bytes of the head
    assert sizes[0].products_per_token == sizes[1].products_per_token


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_exactly_the_drafts_that_their_hash_makes_right_are_accepted(
    directory: Path, rate: float
) -> None:
    """Four drafts are planned for each step. A draft that happens to be right would be accepted,
    too, but with the seed of this prompt none is.
    """
    worker = drafting(directory, f"draft_acceptance_rate = {rate}\n{FREE}\n[draft]\nseconds = 0")
    oracle, known, accepted = oracle_of(worker), list(PROMPT), []
    output = worker.runner.execute(step(0, (0, 5, 0), new_requests=(new(0, GREEDY, num_groups=2),)))
    known += output.token_ids.tolist()
    for number in range(1, 4):
        drafts = {"num_draft_tokens": ints(4), "draft_token_ids": ints(-1, -1, -1, -1)}
        output = worker.runner.execute(step(number, (0, 5, len(known) - 1), **drafts))
        right = oracle.continuation(known, 5)
        finds = [oracle.drafts_right([*known, *right[:i]], rate) for i in range(4)]
        expected = [*finds, False].index(False)
        accepted.append(expected)
        assert output.token_ids.tolist() == right[: expected + 1]
        known += output.token_ids.tolist()
    assert sum(accepted) == {0.0: 0, 1.0: 12}.get(rate, sum(accepted))


def test_the_runs_of_a_draft_model_take_its_time(directory: Path) -> None:
    """The first draft takes a run over the last token, and each further draft one more run."""
    worker = drafting(directory, f"{FREE}\n[draft]\nseconds = 10")
    runner = worker.runner
    assert isinstance(runner, TimedRunner)
    now = [0.0]
    runner.device.clock, runner.device.sleep = lambda: now[0], lambda _: None
    runner.begin(step(0, (0, 5, 0), new_requests=(new(0, GREEDY, num_groups=2),)))
    prompt = runner.device.ends
    drafts = {"num_draft_tokens": ints(4), "draft_token_ids": ints(-1, -1, -1, -1)}
    runner.begin(step(1, (0, 5, 5), **drafts))
    assert runner.device.ends - prompt == 40


def test_a_draft_model_needs_memory_for_its_weights_and_keys(directory: Path) -> None:
    worker = drafting(directory, HARDWARE, **NO_BLOCKS)
    alone = build(directory, profile=save_profile(directory, HARDWARE), **LIMITS | NO_BLOCKS)
    assert worker.description.bytes_per_block > alone.description.bytes_per_block
    assert worker.description.num_blocks < alone.description.num_blocks


FREE = "kv_cache_memory_bytes = 4_000_000\n[mixed]\nseconds = 0"


def drafting(directory: Path, profile: str, **settings: Any) -> Worker:
    config = {
        "method": "draft_model",
        "model": str(save_draft(directory)),
        "num_speculative_tokens": 4,
    }
    settings = {**LIMITS, "speculative_config": json.dumps(config), **settings}
    return build(directory, profile=save_profile(directory, profile), **settings)
