"""Serves prompts with the real scheduler, pool and model runner. Steps are converted to the
worker's protobuf messages and back, but not sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from stepwell.common.v1 import common_pb2

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.common.request.messages import sampling_from_proto
from services.scheduler.adapters.workers.converters import (
    last_token_ids,
    model_runner_output_from_proto,
    scheduler_output_to_proto,
)
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from services.worker.adapters.converters import step_from_proto, step_output_to_proto
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import StepInput, StepOutput
from tests.parity.situations import BLOCK_SIZE, MAX_MODEL_LEN, MAX_TOKENS, Situation, prompts


@dataclass(frozen=True)
class Run:
    """The answers to the prompts, in order, and statistics. `num_cached_tokens` counts the prefix
    hits of first admissions. `num_copies` counts the blocks that were copied before steps.
    """

    outputs: list[list[int]]
    num_preemptions: int
    num_cached_tokens: int
    num_copies: int


async def generate(
    runner: ModelRunner,
    situation: Situation,
    sampling: common_pb2.SamplingParams,
    *,
    async_scheduling: bool,
    given: Sequence[Sequence[int]] | None = None,
    **changes: Any,
) -> Run:
    """Serves a situation's prompts, or the prompts `given`. `changes` are passed to `serve`."""
    runner.reset()

    def submit(plan: SchedulerOutput) -> Future[StepOutput]:
        answer: Future[StepOutput] = Future()
        answer.set_result(runner.execute(step_of(plan)))
        return answer

    return await serve(
        submit,
        runner.limits,
        situation,
        sampling,
        async_scheduling=async_scheduling,
        given=given,
        **changes,
    )


async def serve(
    submit: Callable[[SchedulerOutput], "Future[StepOutput]"],
    limits: BatchLimits,
    situation: Situation,
    sampling: common_pb2.SamplingParams,
    *,
    async_scheduling: bool = False,
    num_stages: int = 1,
    given: Sequence[Sequence[int]] | None = None,
    disturb: Callable[[Scheduler, Sequence[Request]], None] | None = None,
    **changes: Any,
) -> Run:
    """Serves prompts. `submit` starts a step. Prompts after the eighth arrive three steps later.
    `disturb` is called with all requests before each step. `changes` are changes to the scheduler's
    configuration.
    """
    groups = pool_groups(limits)
    num_blocks = min(situation.num_blocks * len(groups), limits.num_blocks)
    config = SchedulerConfig(
        max_num_seqs=situation.max_num_seqs,
        max_num_batched_tokens=situation.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        groups=tuple(groups),
        async_scheduling=async_scheduling,
        pipeline_parallel_size=num_stages,
        **changes,
    )
    pool = InProcessPool(config)
    scheduler = Scheduler(config, pool)
    requests = [
        Request(
            request_id=f"request-{number}",
            key=number + 1,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=replace(sampling_from_proto(sampling), max_tokens=MAX_TOKENS),
        )
        for number, prompt in enumerate(given or situation.chosen(prompts()))
    ]
    for request in requests[:8]:
        scheduler.add(request)
    in_flight: deque[tuple[SchedulerOutput, Future[StepOutput]]] = deque()
    late, num_steps, num_copies = requests[8:], 0, 0
    while scheduler.has_work or in_flight or late:
        if num_steps == 3:
            while late:
                scheduler.add(late.pop(0))
        num_steps += 1
        if disturb is not None:
            disturb(scheduler, requests)
        planned = False
        if scheduler.has_work:
            plan = await scheduler.schedule()
            num_copies += len(plan.copies)
            pool.core.check()
            in_flight.append((plan, submit(plan)))
            planned = bool(plan.requests)
        if len(in_flight) >= config.num_steps_in_flight or not planned:
            done, answer = in_flight.popleft()
            scheduler.update_from_output(done, output_of(answer.result()))
    return Run(
        [request.token_ids[request.num_prompt_tokens :] for request in requests],
        scheduler.num_preemptions,
        sum(request.num_cached_tokens or 0 for request in requests),
        num_copies,
    )


def pool_groups(limits: BatchLimits) -> list[KVCacheGroup]:
    """Converts a runner's KV-cache groups to the pool's configuration."""
    attending = [
        KVCacheGroup(AttentionType.FULL, size)
        if window is None
        else KVCacheGroup(AttentionType.SLIDING_WINDOW, size, window)
        for window, size in list(zip(limits.windows, limits.block_sizes, strict=True))[
            : limits.first_state_group
        ]
    ]
    return attending + [
        KVCacheGroup(
            AttentionType.STATE_SPACE,
            size,
            mamba_cache_mode=MambaCacheMode.ALIGN if size == BLOCK_SIZE else MambaCacheMode.NONE,
        )
        for size in limits.state_block_sizes
    ]


def step_of(plan: SchedulerOutput, num_stages: int = 1) -> StepInput:
    """A planned step, converted to the worker's protobuf message and back."""
    message = scheduler_output_to_proto(plan, generation=1, traceparent="")
    if num_stages > 1:
        message.last_token_ids = last_token_ids(plan)
    return step_from_proto(message)


def output_of(output: StepOutput) -> ModelRunnerOutput:
    """A worker's output, converted to its protobuf message and back."""
    return model_runner_output_from_proto(
        step_output_to_proto(output, queue_nanos=0, execute_nanos=0)
    )
