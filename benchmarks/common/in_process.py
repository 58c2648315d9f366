"""Runs all services' code in one process, as a baseline for the separate services.

    python -m benchmarks.common.in_process --model models/demo --num-blocks 1000

The real cores of all four services call each other directly. These are the gateway's inference and
detokenizing, the scheduler's policy and engine loop, the pool, and the worker's runner in its one
compute thread. There are no gRPC calls, messages or sockets. When the program can run loads, it
writes the line `ready` to standard output. Then it reads loads (`Load`) from standard input, runs
them one after another, and writes the times of each load's requests (`RequestTimes`) to standard
output. Each load and each result is one line of JSON.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.common.conversions import to_output, to_request, to_step
from benchmarks.common.load import Arrived, Load, run_load
from services.common.process.processors import usable_processors
from services.common.process.settings import parse_settings
from services.common.request.finish import Finish
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.grammars.judge import GrammarJudge
from services.gateway.adapters.tokenizer.hf_tokenizer import load_tokenizer
from services.gateway.core.caller import Caller
from services.gateway.core.request.arrivals import Arrival, Arrivals
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.inflight import Inflight, Mailbox
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from services.gateway.core.request.sampling_defaults import SamplingDefaults
from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.adapters.replica_config import scheduler_config
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.engine.engine_core import EngineCore
from services.scheduler.core.output import (
    EngineCoreOutputs,
    ModelRunnerOutput,
    PreemptionCause,
    SchedulerOutput,
)
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import PoolLost, WorkersLost
from services.scheduler.core.request import Request
from services.scheduler.options.listed import TRANSFERS
from services.scheduler.settings import SchedulerSettings
from services.simulation.inprocess_pool import InProcessPool
from services.worker.adapters.compute import ComputeThread
from services.worker.adapters.converters import description_to_proto
from services.worker.build import build_worker
from services.worker.core.worker import StepRunner, Worker, WorkerDescription
from services.worker.platforms.threads import choose_threads
from services.worker.settings import WorkerSettings


class RunnerExecutor:
    """An `Executor` (the scheduler's port to workers) that calls a runner in its compute thread."""

    def __init__(self, runner: StepRunner, compute: ComputeThread) -> None:
        self._runner = runner
        self._compute = compute

    async def submit(
        self,
        plan: SchedulerOutput,
        traceparent: str = "",  # noqa: ARG002 - nothing is traced
    ) -> asyncio.Future[ModelRunnerOutput]:
        step = to_step(plan)
        return self._compute.submit(lambda: to_output(self._runner.execute(step)))


class OneReplica:
    """A `PoolAndWorkers` of the scheduler's engine, which restores lost pools and workers. In one
    process they are never lost.
    """

    workers_were_ended = False

    async def open(self) -> None:
        raise PoolLost("there is nothing to open again in one process")


class Unobserved:
    """A `StepObserver` and `Readiness` of the scheduler's engine. It ignores all events."""

    def ready(self) -> None:
        pass

    def not_ready(self, reason: str) -> None:
        pass

    def arrived(self, requests: Sequence[Request]) -> None:
        pass

    def begin(self) -> str:
        return ""

    def planned(self, plan: SchedulerOutput) -> None:
        pass

    def done(self, plan: SchedulerOutput, update: EngineCoreOutputs) -> None:
        pass

    def ended(self, requests: Sequence[Request]) -> None:
        pass

    def paused(self) -> None:
        pass

    def resumed(self) -> None:
        pass

    def preempted(self, requests: Sequence[Request], cause: PreemptionCause) -> None:
        pass

    def lost(self, preempted: Sequence[Request], lost: PoolLost | WorkersLost) -> None:
        pass

    def recovered(self) -> None:
        pass

    def stopped(self) -> None:
        pass


class LocalEngine:
    """The gateway's port `Engine` and the scheduler's port `Delivery`, joined by calls."""

    def __init__(self, limits: ModelLimits) -> None:
        self.engine: EngineCore
        self._limits = limits
        self._keys = itertools.count(1)
        self._numbers = itertools.count()
        self._waiting: dict[Request, Inflight] = {}
        self._requests: dict[Inflight, Request] = {}

    def limits(self) -> ModelLimits:
        return self._limits

    async def until_limits(self, on_wait: Callable[[str], None]) -> None: ...

    def check_room(self, caller: Caller, deadline: float | None) -> None:
        pass

    def arriving(self, caller: Caller, _deadline: float | None) -> Arrival:
        return Arrivals().begin(caller)

    def start(self, requests: Sequence[EngineRequest]) -> Mailbox:
        mailbox = Mailbox(requests, self._numbers, self._drop, time.perf_counter_ns)
        for inflight in mailbox.inflights:
            request = to_request(inflight.request, next(self._keys))
            self._waiting[request] = inflight
            self._requests[inflight] = request
            self.engine.changes.add(request)
        return mailbox

    def deliver(self, update: EngineCoreOutputs) -> None:
        for request in update.plan.new:
            if request in self._waiting:
                self._waiting[request].admitted(request.num_cached_tokens or 0)
        for news in update:
            inflight = self._waiting.get(news.request)
            if inflight is not None and news.token_ids:
                inflight.tokens(list(news.token_ids))
        self.deliver_ends(update.ended)

    def deliver_ends(self, requests: Sequence[Request]) -> None:
        for request in requests:
            inflight = self._waiting.pop(request, None)
            if inflight is not None and request.finish_reason is not None:
                inflight.finished(Finish(request.finish_reason))
                del self._requests[inflight]

    def _drop(self, inflight: Inflight) -> None:
        request = self._requests.pop(inflight, None)
        if request is not None:
            del self._waiting[request]
            self.engine.changes.abort([request])


class InProcessClient:
    """A client that sends a load's requests to the gateway's core."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        arrived: Arrived,
        traceparent: str = "",  # noqa: ARG002 - nothing is traced
    ) -> None:
        request = ClientRequest(
            request_id="benchmark",
            prompts=(Prompt(list(prompt)),),
            sampling=SamplingParams(temperature=0, max_tokens=num_tokens),
            ignore_eos=True,
        )
        generation = await self._inference.prepare(request)
        await self._inference.delivery(generation, _Counts(arrived), stream=True).run()


class _Counts:
    """Receives the pieces of an answer, and reports the number of tokens in each piece."""

    is_ready = True

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived

    def put(self, added: list[Piece]) -> None:
        for piece in added:
            if piece.token_ids:
                self._arrived(len(piece.token_ids))

    async def drain(self) -> None: ...


class InProcess:
    """The connected cores of all services. `client` and `engine` are set inside its context."""

    def __init__(
        self, settings: WorkerSettings, loaded: Callable[[Worker], None] | None = None
    ) -> None:
        """`loaded` may change the worker after it is built."""
        self._settings = settings
        self._loaded = loaded
        self._compute = ComputeThread()
        self._tasks = AsyncExitStack()
        self.client: InProcessClient
        self.engine: EngineCore

    async def __aenter__(self) -> "InProcess":
        worker = await self._compute.submit(self._load)
        if self._loaded is not None:
            self._loaded(worker)
        built = worker.description
        shape = ReplicaShape(description_to_proto(built), built.num_blocks)
        config = scheduler_config(SchedulerSettings(kvpool="", workers=()), shape)
        local = LocalEngine(_limits(built, config))
        pool = InProcessPool(config)
        self.engine = local.engine = EngineCore(
            Scheduler(config, pool, TRANSFERS(config, built.num_tier_blocks).connect),
            RunnerExecutor(worker.runner, self._compute),
            OneReplica(),
            local,
            Unobserved(),
            Unobserved(),
            time.monotonic,
        )
        tokenizer = load_tokenizer(self._settings.model)
        inference = Inference(
            built.model_name,
            tokenizer,
            local,
            GrammarJudge(tokenizer.to_json),
            defaults=SamplingDefaults(),
            max_choices=1,
            max_items=2**17,
            max_logprobs=2**22,
            draw_seed=lambda: 0,
            unix_nanos=time.time_ns,
        )
        self.client = InProcessClient(inference)
        # If the engine fails, the task group cancels the calls that wait for it.
        group = await self._tasks.enter_async_context(asyncio.TaskGroup())
        self._tasks.callback(group.create_task(local.engine.run()).cancel)
        return self

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._tasks.__aexit__(*raised)
        finally:
            self._compute.close()

    def _load(self) -> Worker:
        threads = choose_threads(usable_processors(), asked=self._settings.num_threads)
        torch.set_num_threads(threads.num_threads)
        return build_worker(self._settings, "in-process", lambda: None)


def _limits(built: WorkerDescription, config: SchedulerConfig) -> ModelLimits:
    return ModelLimits(
        max_model_len=built.max_model_len,
        max_request_tokens=config.max_model_len,
        vocab_size=built.vocab_size,
        eos_token_ids=built.eos_token_ids,
        priority_scheduling=False,
        hidden_size=built.hidden_size,
    )


async def _answer_loads(settings: WorkerSettings) -> None:
    """Runs the loads from standard input, one after another, until it ends."""
    async with InProcess(settings) as composed:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            times = await run_load(composed.client, Load(**json.loads(line)))
            print(json.dumps([asdict(taken) for taken in times]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.common.in_process")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--num-blocks", type=int, required=True, help="blocks of the KV cache")
    parsed = parser.parse_args()
    flags = ["--model", str(parsed.model), "--num-blocks", str(parsed.num_blocks)]
    uvloop.run(_answer_loads(parse_settings(WorkerSettings, "worker", flags, {})))


if __name__ == "__main__":
    main()
