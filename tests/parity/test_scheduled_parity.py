"""The same tokens however the scheduler serves them: with one step in flight or two, in chunks,
with prefix hits, and from a pool so small that requests are preempted again and again.

Scheduler, pool and runner are the real ones, with the worker's messages between them and no wire.
"""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from stepwell.common.v1 import common_pb2
from transformers import PreTrainedModel

from services.cli.replay.inprocess_pool import InProcessPool
from services.scheduler.adapters.worker_messages import to_execute_request, to_step_output
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.request import Request, StopConditions
from services.scheduler.core.scheduler import Scheduler
from services.worker.adapters.converters import output_to_message, step_from_message
from services.worker.core.runner import Runner
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from tests.worker.runner_driver import build_runner

BLOCK_SIZE = 4
MAX_TOKENS = 24
LARGE_POOL = 2400
SMALL_POOL = 40
"""Blocks that hold two or three of the sixteen requests."""


@dataclass(frozen=True)
class Case:
    """How requests are served."""

    max_num_batched_tokens: int = 512
    num_blocks: int = LARGE_POOL
    max_num_seqs: int = 16


CASES = {
    "alone": Case(max_num_seqs=1),
    "sixteen together": Case(),
    "chunks of 7": Case(max_num_batched_tokens=7),
    "preempted again and again": Case(num_blocks=SMALL_POOL, max_num_batched_tokens=48),
}


@dataclass(frozen=True)
class Served:
    """A model in both worlds."""

    reference: PreTrainedModel
    directory: Path


@pytest.fixture(scope="module", params=sorted(TINY_MODELS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    return Served(save_tiny_model(directory, request.param), directory)


def prompts() -> list[list[int]]:
    """Sixteen prompts of 1 to 46 tokens; every third begins as the longest does."""
    random = np.random.default_rng(11)
    longest = random.integers(3, VOCAB_SIZE, 46).tolist()
    made = [random.integers(3, VOCAB_SIZE, 1 + 3 * number).tolist() for number in range(16)]
    return [longest[:40] + own[:6] if number % 3 == 0 else own for number, own in enumerate(made)]


async def generate(
    runner: Runner, case: Case, sampling: common_pb2.SamplingParams, *, async_scheduling: bool
) -> tuple[list[list[int]], Scheduler]:
    """Serves all prompts, of which the second half arrives three steps late."""
    runner.reset()
    pool = InProcessPool(case.num_blocks, BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        num_blocks=case.num_blocks,
        async_scheduling=async_scheduling,
    )
    scheduler = Scheduler(config, pool)
    requests = [
        Request(
            request_id=f"request-{number}",
            key=number + 1,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            stop=StopConditions(MAX_TOKENS),
            sampling=sampling,
        )
        for number, prompt in enumerate(prompts())
    ]
    for request in requests[:8]:
        scheduler.add(request)
    in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
    late, num_steps = requests[8:], 0
    while scheduler.has_work or in_flight or late:
        if num_steps == 3:
            while late:
                scheduler.add(late.pop(0))
        num_steps += 1
        planned = False
        if scheduler.has_work:
            plan = await scheduler.schedule()
            pool.core.check()
            in_flight.append((plan, execute(runner, plan)))
            planned = bool(plan.requests)
        if len(in_flight) > async_scheduling or not planned:
            scheduler.update_from_output(*in_flight.popleft())
    return [request.token_ids[request.num_prompt_tokens :] for request in requests], scheduler


def execute(runner: Runner, plan: StepPlan) -> StepOutput:
    """Runs a step as the worker would that gets it over the wire."""
    step = step_from_message(to_execute_request(plan, generation=1, traceparent=""))
    return to_step_output(output_to_message(runner.execute(step), queue_nanos=0, execute_nanos=0))


def reference_outputs(model: PreTrainedModel) -> list[list[int]]:
    outputs = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


async def test_greedy_output_is_that_of_transformers(served: Served) -> None:
    expected = reference_outputs(served.reference)
    runner = build_runner(served.directory, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL)
    greedy = common_pb2.SamplingParams(temperature=0, seed=0, max_tokens=MAX_TOKENS)
    for name, case in CASES.items():
        for async_scheduling in (False, True):
            outputs, scheduler = await generate(
                runner, case, greedy, async_scheduling=async_scheduling
            )
            assert outputs == expected, f"{name}, async {async_scheduling}"
            assert (scheduler.num_preemptions > 0) == (case.num_blocks == SMALL_POOL)


async def test_sampled_output_is_the_same_in_every_case(served: Served) -> None:
    runner = build_runner(served.directory, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL)
    sampling = common_pb2.SamplingParams(
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        seed=1234,
        max_tokens=MAX_TOKENS,
    )
    runs = {
        json.dumps([name, async_scheduling]): (
            await generate(runner, case, sampling, async_scheduling=async_scheduling)
        )[0]
        for name, case in CASES.items()
        for async_scheduling in (False, True)
    }
    first = next(iter(runs.values()))
    assert len({token for output in first for token in output}) > 50
    assert all(run == first for run in runs.values()), [
        name for name, run in runs.items() if run != first
    ]
