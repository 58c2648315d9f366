"""Measures the services and one process with all their code. Prints each table when complete."""

import asyncio
import enum
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.console import log, show
from benchmarks.common.hops import HopRun, hops_table, median_hops
from benchmarks.common.load import Load
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model, vocab_size
from benchmarks.common.spans import SpanReceiver
from benchmarks.common.stack import Stack
from benchmarks.serving import tables
from benchmarks.serving.checkout import Checkout
from benchmarks.serving.comparison import Schedule, compare
from benchmarks.serving.in_process_child import InProcessChild
from benchmarks.serving.probes import run_hops
from benchmarks.serving.structured_neighbors import CONSTRAINED, SAMPLED, NeighborTarget
from benchmarks.serving.targets import GrpcTarget, HttpTarget, InProcessTarget, Target
from services.cli.settings import UpSettings

SPARE_BLOCKS = 64
BLOCK_SIZE = 16

PAIRED_ROUNDS = 8
"""The factor on the number of rounds in comparisons of targets that differ little."""
ROOT = Path(__file__).parents[2]


class Part(enum.Enum):
    """A part of the measurement that can run alone. STAGES and STRUCTURED run only on request."""

    TRACING = "tracing"
    STAGES = "stages"
    STRUCTURED = "structured"


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the measurement."""

    models: tuple[str, ...]
    schedule: Schedule
    trace_ratios: tuple[float, ...]
    """Fractions of requests that are traced. Each fraction is measured with its own services."""
    json_file: Path | None
    baseline: Path | None
    """Directory of another checkout, or None. If given, only the comparison with it is run."""
    only: Part | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """The lowest and the highest concurrency of the schedule."""
        levels = self.schedule.concurrencies
        return tuple(dict.fromkeys((min(levels), max(levels))))

    @property
    def num_blocks(self) -> int:
        """The number of KV-cache blocks that the highest concurrency needs, plus SPARE_BLOCKS."""
        each = -(-(self.schedule.prompt_tokens + self.schedule.output_tokens) // BLOCK_SIZE)
        return max(self.schedule.concurrencies) * each + SPARE_BLOCKS

    def load(self, model: Path, concurrency: int, seed: str) -> Load:
        """One load of `schedule`, for a measurement that does not compare targets."""
        return self.schedule.load(concurrency, vocab_size(model), seed)


async def measure(options: Options, command: str) -> dict[str, Any]:
    """Measures everything, and prints each table when it is complete. Returns all figures."""
    found = machine()
    results: dict[str, Any] = {"command": command, "machine": found, "models": {}}
    show(machine_text(found, command))
    models = [await asyncio.to_thread(find_model, name) for name in options.models]
    for number, model in enumerate(models):
        figures = await _measure_wanted(options, model, with_tracing=number == 0)
        results["models"][model.name] = figures
    return results


async def _measure_wanted(options: Options, model: Path, *, with_tracing: bool) -> dict[str, Any]:
    if options.baseline is not None:
        return await measure_baseline(options, model, options.baseline)
    match options.only:
        case None:
            return await measure_model(options, model, with_tracing=with_tracing)
        case Part.TRACING:
            return await measure_only_tracing(options, model)
        case Part.STAGES:
            return await measure_stages(options, model)
        case Part.STRUCTURED:
            return await measure_structured(options, model)


async def measure_model(options: Options, model: Path, *, with_tracing: bool) -> dict[str, Any]:
    """Measures one model. The cost of tracing is measured only if `with_tracing` is true."""
    ratios = options.trace_ratios if with_tracing else (1.0,)
    results: dict[str, Any] = {}
    async with SpanReceiver() as receiver:
        async with AsyncExitStack() as scope:
            log(f"starting {model.name} in four services, and in one process")
            stack = Stack(_settings(options, model))
            child = InProcessChild(model, options.num_blocks)
            await enter_all(scope, stack, child)
            results["serving"] = await measure_serving(options, model, stack, child)
            log(f"starting {model.name} with tracing")
            traced = {
                ratio: Stack(_settings(options, model, receiver.endpoint, ratio))
                for ratio in ratios
            }
            await enter_all(scope, *traced.values())
            receiver.keep()
            runs = await hop_runs(options, model, traced[1.0])
            if with_tracing:
                results["tracing"] = await measure_tracing(options, model, stack, traced)
        # Services send their remaining spans when they stop.
        spans = receiver.take()
        results["hops"] = {run.concurrency: median_hops(run, spans) for run in runs}
        show(
            f"### {model.name}: a decode step, hop by hop",
            hops_table(results["hops"]),
            tables.HOPS_NOTE,
        )
        if with_tracing:
            results["span_work"] = await measure_span_work(options, receiver.endpoint)
    return results


async def measure_serving(
    options: Options, model: Path, stack: Stack, child: InProcessChild
) -> list[dict[str, Any]]:
    """Compares the services with one process that contains the code of all services."""
    targets: dict[str, Target] = {
        "one process": InProcessTarget(child),
        "services, gRPC": GrpcTarget(stack),
        "services, HTTP": HttpTarget(stack),
    }
    schedule = options.schedule
    rows = await compare(targets, schedule, vocab_size(model), log)
    show(
        f"### {model.name}: {schedule.prompt_tokens} tokens in, {schedule.output_tokens} out",
        tables.serving_table(rows),
        tables.rounds_text(rows),
        "Processor time per output token, in microseconds:",
        tables.processor_table(rows),
    )
    return [asdict(row) for row in rows]


async def measure_baseline(options: Options, model: Path, root: Path) -> dict[str, Any]:
    """Compares this checkout's services with the services of another checkout, over each API."""
    log(f"starting {model.name} in this checkout and in {root}")
    ours = Checkout(ROOT, model, options.num_blocks)
    theirs = Checkout(root, model, options.num_blocks)
    schedule = replace(options.schedule, num_rounds=options.schedule.num_rounds * PAIRED_ROUNDS)
    results: dict[str, Any] = {}
    async with AsyncExitStack() as scope:
        await enter_all(scope, theirs, ours)
        for api, target in (("gRPC", GrpcTarget), ("HTTP", HttpTarget)):
            targets: dict[str, Target] = {"before": target(theirs), "now": target(ours)}
            rows = await compare(targets, schedule, vocab_size(model), log)
            show(
                f"### {model.name} through {api}, beside another checkout",
                tables.serving_table(rows, "before"),
                tables.rounds_text(rows),
                "Processor time per output token, in microseconds:",
                tables.processor_table(rows),
            )
            results[api] = [asdict(row) for row in rows]
    return results


async def measure_only_tracing(options: Options, model: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    async with SpanReceiver() as receiver:
        async with AsyncExitStack() as scope:
            log(f"starting {model.name} with tracing and without")
            stack = Stack(_settings(options, model))
            traced = {
                ratio: Stack(_settings(options, model, receiver.endpoint, ratio))
                for ratio in options.trace_ratios
            }
            await enter_all(scope, stack, *traced.values())
            results["tracing"] = await measure_tracing(options, model, stack, traced)
        results["span_work"] = await measure_span_work(options, receiver.endpoint)
    return results


async def measure_stages(options: Options, model: Path) -> dict[str, Any]:
    """Compares one worker with two pipeline stages. Each process computes with one thread.

    The token budget of a step is the length of two prompts, so that concurrent requests are
    distributed over several steps in flight.
    """
    log(f"starting {model.name} in one worker and in two stages")
    one = replace(
        _settings(options, model, ratio=0.0),
        num_threads=1,
        max_num_batched_tokens=2 * options.schedule.prompt_tokens,
    )
    stacks = {
        "one worker": Stack(one),
        "two stages": Stack(replace(one, pipeline_parallel_size=2)),
    }
    async with AsyncExitStack() as scope:
        await enter_all(scope, *stacks.values())
        targets: dict[str, Target] = {name: GrpcTarget(stack) for name, stack in stacks.items()}
        rows = await compare(targets, options.schedule, vocab_size(model), log)
    show(
        f"### {model.name} in one worker and in two stages, of one thread each",
        tables.serving_table(rows, "one worker"),
        tables.rounds_text(rows),
    )
    return {"stages": [asdict(row) for row in rows]}


async def measure_structured(options: Options, model: Path) -> dict[str, Any]:
    """Measures a load of unconstrained requests while as many other requests run. In every second
    run, these other requests are constrained to a JSON schema.
    """
    log(f"starting {model.name}")
    settings = _settings(options, model, ratio=0.0)
    schedule = replace(options.schedule, num_rounds=options.schedule.num_rounds * PAIRED_ROUNDS)
    async with Stack(replace(settings, num_blocks=2 * options.num_blocks)) as stack:
        targets: dict[str, Target] = {
            "beside unconstrained ones": NeighborTarget(stack, SAMPLED),
            "beside constrained ones": NeighborTarget(stack, CONSTRAINED),
        }
        rows = await compare(targets, schedule, vocab_size(model), log)
    show(
        f"### {model.name}: unconstrained requests beside as many others",
        tables.neighbors_table(rows),
        tables.rounds_text(rows),
        "Processor time for all requests per output token of the measured ones, in microseconds:",
        tables.processor_table(rows),
    )
    return {"structured": [asdict(row) for row in rows]}


async def hop_runs(options: Options, model: Path, stack: Stack) -> list[HopRun]:
    """Measures the hops of a step (common/hops.py) at the lowest and the highest concurrency."""
    await run_hops(stack, options.load(model, 1, "hops/warm-up"))
    runs = []
    for level in options.ends:
        log(f"{level:>4} at once, hop by hop")
        runs.append(await run_hops(stack, options.load(model, level, f"hops/{level}")))
    return runs


async def measure_tracing(
    options: Options, model: Path, stack: Stack, traced: Mapping[float, Stack]
) -> list[dict[str, Any]]:
    """Compares latency and throughput with and without tracing."""
    targets: dict[str, Target] = {"off": HttpTarget(stack)}
    targets |= {f"{ratio:.0%}": HttpTarget(other) for ratio, other in traced.items()}
    schedule = replace(options.schedule, concurrencies=options.ends)
    rows = await compare(targets, schedule, vocab_size(model), log)
    show(
        f"### {model.name}: with tracing",
        tables.tracing_table(rows),
        tables.rounds_text(rows),
        "Processor time per output token, in microseconds:",
        tables.processor_table(rows),
    )
    return [asdict(row) for row in rows]


async def measure_span_work(options: Options, endpoint: str) -> dict[str, Any]:
    """Measures the processor time of a step's spans in separate processes without a model."""
    log("spans by themselves")
    work = {"off": {level: await span_work("", 1.0, level) for level in options.ends}}
    for ratio in options.trace_ratios:
        work[f"{ratio:.0%}"] = {
            level: await span_work(endpoint, ratio, level) for level in options.ends
        }
    show(
        "The spans of a step by themselves, encoding and sending included:",
        tables.span_work_table(work),
    )
    return work


async def enter_all(scope: AsyncExitStack, *contexts: AbstractAsyncContextManager[Any]) -> None:
    """Enters several contexts concurrently. `scope` exits them in reverse order of their start,
    also if one of them fails to start.
    """
    async with asyncio.TaskGroup() as starting:
        for context in contexts:
            starting.create_task(scope.enter_async_context(context))


async def span_work(endpoint: str, ratio: float, level: int) -> dict[str, float]:
    """Runs `benchmarks.serving.tracing_cost` in a separate process."""
    command = (
        *(sys.executable, "-m", "benchmarks.serving.tracing_cost", "--endpoint", endpoint),
        *("--ratio", str(ratio), "--requests", str(level)),
    )
    done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _settings(
    options: Options, model: Path, endpoint: str | None = None, ratio: float | None = None
) -> UpSettings:
    return UpSettings(
        model=model,
        num_blocks=options.num_blocks,
        otlp_endpoint=endpoint,
        trace_sample_ratio=ratio,
        trace_step_sample_ratio=None if endpoint is None else 1.0,
    )
