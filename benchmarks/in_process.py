"""Everything in one process: what the services are measured against.

    python -m benchmarks.in_process --model models/demo --num-blocks 1000

The real cores of all four services over each other: the gateway's inference and detokenizing, the
scheduler's policy and engine loop, the pool, the worker's runner in its one compute thread. What is
missing is what separates processes: gRPC, messages, sockets. As a program it answers on standard
output, a line of JSON each, the loads that it reads from standard input.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
import uvloop

from benchmarks.load import Load, run_load
from services.common.sampling import SamplingParams
from services.common.settings import parse_settings
from services.gateway.adapters.hf_tokenizer import load_tokenizer
from services.gateway.adapters.inflight import Inflight, Mailbox
from services.gateway.core.delta import Finish, FinishReason
from services.gateway.core.inference import Inference
from services.gateway.core.request import ClientRequest, EngineRequest, ModelLimits, Prompt
from services.gateway.core.sampling import Sampling
from services.scheduler.__main__ import make_config
from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.core import plan as scheduler_plan
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine import Engine
from services.scheduler.core.plan import RequestUpdate, StepPlan
from services.scheduler.core.ports import BlockTables, PoolLost
from services.scheduler.core.request import Request, StopConditions
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.settings import SchedulerSettings
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.converters import description_to_message
from services.worker.adapters.machine import usable_processors
from services.worker.build import build_engine
from services.worker.core.engine import Engine as WorkerEngine
from services.worker.core.engine import WorkerDescription
from services.worker.core.runner import Runner
from services.worker.core.step import AppendedBlocks, Int32Array, NewRequest, StepInput, StepOutput
from services.worker.settings import WorkerSettings
from tools.inprocess_pool import InProcessPool

_GENERATION = 1
_SAME_NAME = {field.name for field in fields(SamplingParams)} & {
    field.name for field in fields(Sampling)
}


class RunnerExecutor:
    """The scheduler's `Executor` over a runner in its thread."""

    def __init__(self, runner: Runner, compute: ComputeThread) -> None:
        self._runner = runner
        self._compute = compute

    async def submit(
        self,
        plan: StepPlan,
        traceparent: str = "",  # noqa: ARG002 - nothing is traced
    ) -> asyncio.Future[scheduler_plan.StepOutput]:
        step = _to_step(plan)
        return self._compute.submit(lambda: _to_output(self._runner.execute(step)))


class OneReplica:
    """The scheduler's `Replica` where nothing can be lost but the process."""

    async def reopen(self) -> None:
        raise PoolLost("there is nothing to open again in one process")


class Unobserved:
    """The scheduler's `StepObserver` for nobody."""

    def arrived(self, requests: Sequence[Request]) -> None:
        pass

    def begin(self) -> str:
        return ""

    def planned(self, plan: StepPlan) -> None:
        pass

    def done(self, plan: StepPlan, updates: Iterable[RequestUpdate]) -> None:
        pass

    def ended(self, requests: Sequence[Request]) -> None:
        pass

    def lost(self, preempted: Sequence[Request]) -> None:
        pass


class LocalEngine:
    """The gateway's `Engine` and the scheduler's `Delivery` at once: news by function calls."""

    def __init__(self, limits: ModelLimits) -> None:
        self.engine: Engine
        self._limits = limits
        self._keys = itertools.count(1)
        self._waiting: dict[Request, Inflight] = {}
        self._requests: dict[Inflight, Request] = {}

    def limits(self) -> ModelLimits:
        return self._limits

    def start(self, requests: Sequence[EngineRequest]) -> Mailbox:
        mailbox = Mailbox(requests, self._drop)
        for inflight in mailbox.inflights:
            request = _to_request(inflight.request, next(self._keys))
            self._waiting[request] = inflight
            self._requests[inflight] = request
            self.engine.add(request)
        return mailbox

    def deliver(self, plan: StepPlan | None, updates: Iterable[RequestUpdate]) -> None:
        for request in plan.new if plan is not None else ():
            if request in self._waiting:
                self._waiting[request].admitted(request.num_cached_tokens or 0)
        for update in updates:
            inflight = self._waiting.get(update.request)
            if inflight is None:
                continue
            if update.token_ids:
                inflight.tokens(list(update.token_ids))
            if update.request.finish_reason is not None:
                inflight.finished(Finish(FinishReason(update.request.finish_reason.value)))
                del self._waiting[update.request], self._requests[inflight]

    def _drop(self, inflight: Inflight) -> None:
        request = self._requests.pop(inflight, None)
        if request is not None:
            del self._waiting[request]
            self.engine.abort([request])


class InProcessClient:
    """The gateway's core as a client of the load."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        traceparent: str = "",  # noqa: ARG002 - nothing is traced
    ) -> AsyncIterator[int]:
        request = ClientRequest(
            request_id="benchmark",
            prompts=(Prompt(list(prompt)),),
            sampling=Sampling(temperature=0, max_tokens=num_tokens),
            ignore_eos=True,
        )
        async for news in self._inference.run(self._inference.prepare(request)):
            for piece in news:
                if piece.token_ids:
                    yield len(piece.token_ids)


class InProcess:
    """The composition. `client` is there while its context is entered."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._compute = ComputeThread()
        self._running: asyncio.Task[None] | None = None
        self.client: InProcessClient

    async def __aenter__(self) -> "InProcess":
        worker = await self._compute.submit(self._load)
        built = worker.description
        shape = ReplicaShape(description_to_message(built), built.num_blocks)
        config = make_config(SchedulerSettings(kvpool="", workers=()), shape)
        local = LocalEngine(_limits(built, config))
        pool = InProcessPool(built.num_blocks, built.block_size)
        local.engine = Engine(
            Scheduler(config, pool),
            RunnerExecutor(worker.runner, self._compute),
            OneReplica(),
            local,
            Unobserved(),
        )
        inference = Inference(
            built.model_name,
            load_tokenizer(self._settings.model),
            local,
            max_choices=1,
            draw_seed=lambda: 0,
            unix_nanos=time.time_ns,
        )
        self.client = InProcessClient(inference)
        self._running = asyncio.create_task(local.engine.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._compute.close()

    def _load(self) -> WorkerEngine:
        torch.set_num_threads(self._settings.num_threads or usable_processors())
        return build_engine(self._settings, "in-process", lambda: None)


def _limits(built: WorkerDescription, config: SchedulerConfig) -> ModelLimits:
    return ModelLimits(
        max_model_len=built.max_model_len,
        max_request_tokens=config.max_model_len,
        vocab_size=built.vocab_size,
        eos_token_ids=built.eos_token_ids,
        priority_scheduling=False,
    )


def _to_request(asked: EngineRequest, key: int) -> Request:
    sampling = asked.sampling
    if sampling.max_tokens is None:
        raise AssertionError("the gateway sets max_tokens")
    return Request(
        request_id=asked.request_id,
        key=key,
        token_ids=list(asked.prompt_token_ids),
        num_prompt_tokens=len(asked.prompt_token_ids),
        stop=StopConditions(
            sampling.max_tokens,
            frozenset(sampling.eos_token_ids),
            frozenset(sampling.stop_token_ids),
        ),
        arrival_time=asked.arrival_unix_nanos / 1e9,
        sampling=_to_params(sampling),
    )


def _to_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(sampling, name) for name in _SAME_NAME},
        logit_bias_token_ids=tuple(sampling.logit_bias),
        logit_bias_values=tuple(sampling.logit_bias.values()),
    )


def _to_step(plan: StepPlan) -> StepInput:
    return StepInput(
        generation=_GENERATION,
        step=plan.step,
        slots=_ints([request.slot for request in plan.requests]),
        num_scheduled_tokens=_ints(plan.num_scheduled_tokens),
        num_computed_tokens=_ints(plan.num_computed_tokens),
        removed_slots=_ints(plan.removed_slots),
        new_requests=tuple(
            _new_request(request, tables) for request, tables in plan.block_tables.items()
        ),
        appended_blocks=_appended(plan.appended_blocks),
    )


def _new_request(request: Request, tables: BlockTables) -> NewRequest:
    if request.slot is None or not isinstance(request.sampling, SamplingParams):
        raise AssertionError(f"{request.request_id} is not ready to be sent")
    return NewRequest(
        slot=request.slot,
        token_ids=_ints(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        block_tables=tuple(_ints(table) for table in tables),
    )


def _appended(blocks: Mapping[Request, BlockTables]) -> tuple[AppendedBlocks, ...]:
    slots = _ints([request.slot for request in blocks])
    return tuple(
        AppendedBlocks(
            slots,
            _ints([len(ids) for ids in of_group]),
            _ints([block for ids in of_group for block in ids]),
        )
        for of_group in zip(*blocks.values(), strict=True)
    )


def _to_output(output: StepOutput) -> scheduler_plan.StepOutput:
    token_ids: list[list[int]] = []
    flat, start = output.token_ids.tolist(), 0
    for count in output.num_tokens.tolist():
        token_ids.append(flat[start : start + count])
        start += count
    return scheduler_plan.StepOutput(token_ids, nan_requests=frozenset(output.nan_requests))


def _ints(values: Sequence[int | None]) -> Int32Array:
    return np.array(values, np.int32)


async def _answer_loads(settings: WorkerSettings) -> None:
    """Runs the loads that come, one after the other, until standard input ends."""
    async with InProcess(settings) as composed:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            times = await run_load(composed.client, Load(**json.loads(line)))
            print(json.dumps([asdict(taken) for taken in times]), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.in_process")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--num-blocks", type=int, required=True, help="blocks of the KV cache")
    parsed = parser.parse_args()
    flags = ["--model", str(parsed.model), "--num-blocks", str(parsed.num_blocks)]
    uvloop.run(_answer_loads(parse_settings(WorkerSettings, "worker", flags, {})))


if __name__ == "__main__":
    main()
