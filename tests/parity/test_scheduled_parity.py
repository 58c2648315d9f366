"""The same tokens however the scheduler serves them: with one step in flight or two, in chunks,
with prefix hits, and from a pool so small that requests are preempted again and again.

Scheduler, pool and runner are the real ones, with the worker's messages between them and no wire.
"""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from stepwell.common.v1 import common_pb2

from services.cli.replay.inprocess_pool import InProcessPool
from services.common.kv_cache_groups import AttentionType, GroupSpec
from services.scheduler.adapters.worker_messages import to_execute_request, to_step_output
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.request import Request, StopConditions
from services.scheduler.core.scheduler import Scheduler
from services.worker.adapters.converters import output_to_message, step_from_message
from services.worker.core.runner import Runner
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    LARGE_POOL,
    MAX_MODEL_LEN,
    MAX_TOKENS,
    SAMPLED,
    SITUATIONS,
    SMALL_POOL,
    Situation,
    prompts,
    reference_outputs,
)
from tests.tiny_models import ONE_OF_EACH, save_tiny_model
from tests.worker.runner_driver import build_runner


@dataclass(frozen=True)
class Served:
    """A model, by its kind and on disk."""

    kind: str
    directory: Path


@pytest.fixture(scope="module", params=ONE_OF_EACH)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(directory, request.param)
    return Served(request.param, directory)


async def generate(
    runner: Runner,
    situation: Situation,
    sampling: common_pb2.SamplingParams,
    *,
    async_scheduling: bool,
) -> tuple[list[list[int]], Scheduler]:
    """Serves all prompts, of which the second half arrives three steps late."""
    runner.reset()
    groups = pool_groups(runner)
    num_blocks = min(situation.num_blocks * len(groups), runner.limits.num_blocks)
    pool = InProcessPool(num_blocks, BLOCK_SIZE, groups=groups)
    config = SchedulerConfig(
        max_num_seqs=situation.max_num_seqs,
        max_num_batched_tokens=situation.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        groups=tuple(groups),
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


def pool_groups(runner: Runner) -> list[GroupSpec]:
    """The runner's KV-cache groups, as the pool is told of them."""
    return [
        GroupSpec(AttentionType.FULL, BLOCK_SIZE)
        if window is None
        else GroupSpec(AttentionType.SLIDING_WINDOW, BLOCK_SIZE, window)
        for window in runner.limits.windows
    ]


def execute(runner: Runner, plan: StepPlan) -> StepOutput:
    """Runs a step as the worker would that gets it over the wire."""
    step = step_from_message(to_execute_request(plan, generation=1, traceparent=""))
    return to_step_output(output_to_message(runner.execute(step), queue_nanos=0, execute_nanos=0))


async def test_greedy_output_is_that_of_transformers(served: Served) -> None:
    expected = reference_outputs(served.kind)
    runner = build_runner(served.directory, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL)
    greedy = common_pb2.SamplingParams(**GREEDY)
    for name, situation in SITUATIONS.items():
        for async_scheduling in (False, True):
            outputs, scheduler = await generate(
                runner, situation, greedy, async_scheduling=async_scheduling
            )
            assert outputs == expected, f"{name}, async {async_scheduling}"
            assert (scheduler.num_preemptions > 0) == (situation.num_blocks == SMALL_POOL)


async def test_sampled_output_is_the_same_in_every_case(served: Served) -> None:
    runner = build_runner(served.directory, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL)
    sampling = common_pb2.SamplingParams(**SAMPLED)
    runs = {
        json.dumps([name, async_scheduling]): (
            await generate(runner, situation, sampling, async_scheduling=async_scheduling)
        )[0]
        for name, situation in SITUATIONS.items()
        for async_scheduling in (False, True)
    }
    first = next(iter(runs.values()))
    assert len({token for output in first for token in output}) > 50
    assert all(run == first for run in runs.values()), [
        name for name, run in runs.items() if run != first
    ]
