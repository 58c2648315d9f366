"""`make bench`: what serving through separate services costs, and where the cost lies.

    python -m benchmarks.serving [--quick] [--model DIR|15m|135m|1.1b]... [--concurrency 1,8,32]
                                 [--json FILE] [--baseline DIR]

For each model the same load goes through the four services (gRPC, and HTTP with server-sent events)
and through everything in one process, in turns: whatever else the machine does meets all of them.
Then a step is taken apart, hop by hop, and with the first model it is measured what tracing costs.
Tables go to standard output, progress to standard error.

With --baseline the services are compared with those of another checkout instead, each run by its
own `stepwell up`.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common import report
from benchmarks.common.hops import HopRun, median_hops, run_hops
from benchmarks.common.load import Load
from benchmarks.common.spans import SpanReceiver
from benchmarks.common.stack import Stack
from benchmarks.serving.checkout import Checkout
from benchmarks.serving.comparison import GrpcSide, HttpSide, InProcessSide, Schedule, Side, compare
from benchmarks.serving.in_process_child import InProcessChild
from services.cli.settings import UpSettings

RANDOM_MODELS = ("15m", "135m", "1.1b")
DEFAULT_MODELS = ("models/demo", "135m")
SCHEDULE = Schedule((1, 8, 32), num_rounds=5, requests_each=3, prompt_tokens=128, output_tokens=64)
QUICK = Schedule((1, 4), num_rounds=1, requests_each=1, prompt_tokens=32, output_tokens=8)
PAIRED_ROUNDS = 8
"""Rounds beside another checkout, for each round otherwise: the difference sought is small."""
SPARE_BLOCKS = 64
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    models: tuple[str, ...]
    schedule: Schedule
    trace_ratios: tuple[float, ...]
    json_file: Path | None
    baseline: Path | None

    @property
    def ends(self) -> tuple[int, ...]:
        """The least and the greatest concurrency."""
        levels = self.schedule.concurrencies
        return tuple(dict.fromkeys((min(levels), max(levels))))

    @property
    def num_blocks(self) -> int:
        """Blocks that hold every request of the heaviest load, and some more."""
        each = -(-(self.schedule.prompt_tokens + self.schedule.output_tokens) // BLOCK_SIZE)
        return max(self.schedule.concurrencies) * each + SPARE_BLOCKS

    def load(self, model: Path, concurrency: int, seed: str) -> Load:
        """A load outside any comparison."""
        return self.schedule.load(concurrency, vocab_size(model), seed)


async def measure(options: Options, command: str) -> dict[str, Any]:
    """Measures everything and prints each table as soon as it is there; returns all figures."""
    found = report.machine()
    results: dict[str, Any] = {"command": command, "machine": found, "models": {}}
    show(report.machine_text(found, command))
    models = [await asyncio.to_thread(find_model, name) for name in options.models]
    for number, model in enumerate(models):
        if options.baseline is not None:
            results["models"][model.name] = await measure_baseline(options, model, options.baseline)
            continue
        found_here = await measure_model(options, model, with_tracing=number == 0)
        results["models"][model.name] = found_here
    return results


async def measure_model(options: Options, model: Path, *, with_tracing: bool) -> dict[str, Any]:
    """Everything about one model, tracing only if asked."""
    ratios = options.trace_ratios if with_tracing else (1.0,)
    results: dict[str, Any] = {}
    async with SpanReceiver() as receiver:
        async with AsyncExitStack() as scope:
            tell(f"starting {model.name} in four services, and in one process")
            stack = Stack(_settings(options, model))
            child = InProcessChild(model, options.num_blocks)
            await enter_all(scope, stack, child)
            results["serving"] = await measure_serving(options, model, stack, child)
            tell(f"starting {model.name} with tracing")
            traced = {
                ratio: Stack(_settings(options, model, receiver.endpoint, ratio))
                for ratio in ratios
            }
            await enter_all(scope, *traced.values())
            receiver.keep()
            runs = await hop_runs(options, model, traced[1.0])
            if with_tracing:
                results["tracing"] = await measure_tracing(options, model, stack, traced)
        # Services send what is left of their traces when they stop.
        spans = receiver.take()
        results["hops"] = {run.concurrency: median_hops(run, spans) for run in runs}
        show(
            f"### {model.name}: a decode step, hop by hop",
            report.hops_table(results["hops"]),
            report.HOPS_NOTE,
        )
        if with_tracing:
            results["span_work"] = await measure_span_work(options, receiver.endpoint)
    return results


async def measure_serving(
    options: Options, model: Path, stack: Stack, child: InProcessChild
) -> list[dict[str, Any]]:
    """The services and the one process side by side."""
    sides: dict[str, Side] = {
        "one process": InProcessSide(child),
        "services, gRPC": GrpcSide(stack),
        "services, HTTP": HttpSide(stack),
    }
    schedule = options.schedule
    rows = await compare(sides, schedule, vocab_size(model), tell)
    show(
        f"### {model.name}: {schedule.prompt_tokens} tokens in, {schedule.output_tokens} out",
        report.serving_table(rows),
        report.rounds_text(rows),
        "Processor time per output token, in microseconds:",
        report.processor_table(rows),
    )
    return [asdict(row) for row in rows]


async def measure_baseline(options: Options, model: Path, root: Path) -> dict[str, Any]:
    """The services of this checkout beside those of another one, through each API."""
    tell(f"starting {model.name} in this checkout and in {root}")
    ours = Checkout(Path(__file__).parents[2], model, options.num_blocks)
    theirs = Checkout(root, model, options.num_blocks)
    schedule = replace(options.schedule, num_rounds=options.schedule.num_rounds * PAIRED_ROUNDS)
    results: dict[str, Any] = {}
    async with AsyncExitStack() as scope:
        await enter_all(scope, theirs, ours)
        for api, side in (("gRPC", GrpcSide), ("HTTP", HttpSide)):
            sides: dict[str, Side] = {"before": side(theirs), "now": side(ours)}
            rows = await compare(sides, schedule, vocab_size(model), tell)
            show(
                f"### {model.name} through {api}, beside another checkout",
                report.serving_table(rows, "before"),
                report.rounds_text(rows),
                "Processor time per output token, in microseconds:",
                report.processor_table(rows),
            )
            results[api] = [asdict(row) for row in rows]
    return results


async def hop_runs(options: Options, model: Path, stack: Stack) -> list[HopRun]:
    """Loads whose traces take a step apart, at the least and the greatest concurrency."""
    await run_hops(stack, options.load(model, 1, "hops/warm-up"))
    runs = []
    for level in options.ends:
        tell(f"{level:>4} at once, hop by hop")
        runs.append(await run_hops(stack, options.load(model, level, f"hops/{level}")))
    return runs


async def measure_tracing(
    options: Options, model: Path, stack: Stack, traced: Mapping[float, Stack]
) -> list[dict[str, Any]]:
    """What tracing costs those who are served."""
    sides: dict[str, Side] = {"off": HttpSide(stack)}
    sides |= {f"{ratio:.0%}": HttpSide(other) for ratio, other in traced.items()}
    schedule = replace(options.schedule, concurrencies=options.ends)
    rows = await compare(sides, schedule, vocab_size(model), tell)
    show(f"### {model.name}: with tracing", report.tracing_table(rows))
    return [asdict(row) for row in rows]


async def measure_span_work(options: Options, endpoint: str) -> dict[str, Any]:
    """What the spans of a step cost by themselves."""
    tell("spans by themselves")
    work = {"off": {level: await span_work("", 1.0, level) for level in options.ends}}
    for ratio in options.trace_ratios:
        work[f"{ratio:.0%}"] = {
            level: await span_work(endpoint, ratio, level) for level in options.ends
        }
    show(
        "The spans of a step by themselves, encoding and sending included:",
        report.span_work_table(work),
    )
    return work


async def enter_all(scope: AsyncExitStack, *contexts: AbstractAsyncContextManager[Any]) -> None:
    """Starts several at once; whichever started is stopped with the scope, in reverse order."""
    async with asyncio.TaskGroup() as starting:
        for context in contexts:
            starting.create_task(scope.enter_async_context(context))


async def span_work(endpoint: str, ratio: float, level: int) -> dict[str, float]:
    """Runs `benchmarks.serving.tracing_cost` in a process of its own."""
    command = (
        *(sys.executable, "-m", "benchmarks.serving.tracing_cost", "--endpoint", endpoint),
        *("--ratio", str(ratio), "--requests", str(level)),
    )
    done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def find_model(name: str) -> Path:
    """A directory, or a random model of the size named, made on its first use."""
    if name not in RANDOM_MODELS:
        return Path(name)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepwell"
    directory = cache / f"random-{name}"
    if not directory.is_dir():
        # Brings torch, which clients do without.
        from benchmarks.common.random_model import SIZES, write_model  # noqa: PLC0415

        tell(f"writing a random model of {name} parameters to {directory}")
        unfinished = cache / f"random-{name}.{os.getpid()}"
        write_model(SIZES[name], unfinished)
        unfinished.rename(directory)
    return directory


def vocab_size(model: Path) -> int:
    """Tokens of the model's vocabulary."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def show(*parts: str) -> None:
    """Prints parts of the report."""
    print("\n\n".join(parts), end="\n\n", flush=True)


def tell(line: str) -> None:
    """Shows progress."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def _settings(
    options: Options, model: Path, endpoint: str | None = None, ratio: float | None = None
) -> UpSettings:
    return UpSettings(
        model=model,
        num_blocks=options.num_blocks,
        otlp_endpoint=endpoint,
        trace_sample_ratio=ratio,
    )


def parse_options(argv: Sequence[str]) -> Options:
    """The command line. Ends the process with one sentence when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description="Measure serving through the services against everything in one process.",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="DIR",
        help="model directory, or 15m, 135m, 1.1b for a random model; may be given several times "
        f"(default: {' and '.join(DEFAULT_MODELS)})",
    )
    parser.add_argument(
        "--concurrency",
        type=_levels,
        metavar="N,N",
        help="requests at once (default: 1,8,32)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it works, no more"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="DIR",
        help="compare with the services of another checkout, its gen/ built",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parsed = parser.parse_args(argv)
    schedule = QUICK if parsed.quick else SCHEDULE
    models = tuple(parsed.model or (DEFAULT_MODELS[:1] if parsed.quick else DEFAULT_MODELS))
    for model in models:
        if model not in RANDOM_MODELS and not (Path(model) / "config.json").is_file():
            parser.error(f"{model} is neither a model directory nor one of {RANDOM_MODELS}")
    if parsed.baseline is not None and not (parsed.baseline / "gen" / "stepwell").is_dir():
        parser.error(f"{parsed.baseline} is not a checkout with gen/ built (make proto)")
    return Options(
        models=models,
        schedule=replace(schedule, concurrencies=parsed.concurrency or schedule.concurrencies),
        trace_ratios=(1.0,) if parsed.quick else (0.01, 1.0),
        json_file=parsed.json,
        baseline=parsed.baseline and parsed.baseline.resolve(),
    )


def _levels(text: str) -> tuple[int, ...]:
    levels = tuple(sorted({int(part) for part in text.split(",")}))
    if levels[0] < 1:
        raise ValueError(text)
    return levels


def _messages(error: BaseException) -> list[str]:
    """What went wrong, without where."""
    if isinstance(error, BaseExceptionGroup):
        return [message for inner in error.exceptions for message in _messages(inner)]
    return [str(error) or "a run did not end"]


def main() -> None:
    """Measures, prints, writes."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun = time.monotonic()
    command = shlex.join(["python", "-m", "benchmarks.serving", *sys.argv[1:]])
    try:
        results = uvloop.run(measure(options, command))
    except* (RuntimeError, TimeoutError) as failed:
        tell("\n".join(_messages(failed)))
        sys.exit(1)
    except* KeyboardInterrupt:
        sys.exit(130)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(results, indent=2) + "\n")
    tell(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
