"""What a step costs when computing costs nothing: all processes real, the worker's step empty.

    python -m benchmarks.step [--quick] [--running 64,256,1024] [--rounds N] [--json FILE]

A client holds one session with the scheduler, as a gateway does, and so many requests decode at
once, of which one in sixteen crosses a block in each step. With an empty step the time from one
step to the next is overhead and nothing else; with one of 5 ms it should hide behind it, and the
worker should do as many steps a second as in a bare loop, in the same process and the same round.
Tables go to standard output, progress to standard error.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common import report
from benchmarks.common.hops import HopRun, median_hops
from benchmarks.common.spans import SpanReceiver
from benchmarks.step.dummy_replica import NullStack, Replica
from benchmarks.step.rounds import Round, StepRow, decode, num_blocks, num_tokens, row, run_round

EMPTY, STEP_MILLIS = 0.0, 5.0
TRACE_RATIO = 0.1
MODES = {"async": True, "sync": False}


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    running: tuple[int, ...]
    num_steps: int
    num_rounds: int
    json_file: Path | None

    def replica(self, *, async_scheduling: bool, otlp_endpoint: str = "") -> Replica:
        """A replica that holds the most requests."""
        most = max(self.running)
        return Replica(
            max_num_seqs=most,
            num_blocks=num_blocks(most, self.num_steps),
            async_scheduling=async_scheduling,
            otlp_endpoint=otlp_endpoint,
            trace_sample_ratio=TRACE_RATIO,
        )


async def measure(options: Options, command: str) -> dict[str, Any]:
    """Measures everything and prints each table as soon as it is there; returns all figures."""
    found = report.machine()
    show(report.machine_text(found, command))
    async with AsyncExitStack() as scope:
        stacks = {}
        for mode, asynchronous in MODES.items():
            tell(f"starting a replica, {mode}")
            stack = NullStack(options.replica(async_scheduling=asynchronous))
            stacks[mode] = await scope.enter_async_context(stack)
        empty = await measure_steps(options, stacks, EMPTY)
        show("### An empty step", report.overhead_table(empty), report.OVERHEAD_NOTE)
        filled = await measure_steps(options, stacks, STEP_MILLIS)
        title = f"### A step of {STEP_MILLIS:g} ms"
        show(title, report.hidden_table(filled), report.HIDDEN_NOTE)
    hops = await measure_hops(options)
    show("### An empty step, hop by hop, sync", report.hops_table(hops))
    rows = [asdict(found_row) for found_row in (*empty, *filled)]
    return {"command": command, "machine": found, "rows": rows, "hops": hops}


async def measure_steps(
    options: Options, stacks: Mapping[str, NullStack], step_millis: float
) -> list[StepRow]:
    """Every size in every mode, in turns."""
    rows: list[StepRow] = []
    for running in options.running:
        rounds: dict[str, list[Round]] = defaultdict(list)
        for _ in range(options.num_rounds):
            for mode, stack in stacks.items():
                found = await run_round(stack, running, options.num_steps, step_millis)
                rounds[mode].append(found)
                tell(f"{running:>5} running, {mode}: {_words(found)}")
        rows += [row(running, mode, step_millis, rounds[mode]) for mode in stacks]
    return rows


async def measure_hops(options: Options) -> dict[int, dict[str, float | None]]:
    """Steps one after the other, taken apart by the traces of one in ten."""
    runs: list[HopRun] = []
    async with SpanReceiver() as receiver:
        traced = options.replica(async_scheduling=False, otlp_endpoint=receiver.endpoint)
        async with NullStack(traced) as stack:
            await stack.set_step(EMPTY, 0)
            receiver.keep()
            for running in options.running:
                tell(f"{running:>5} running, hop by hop")
                runs.append(await run_hops(stack, running, options.num_steps))
        # Services send what is left of their traces when they stop.
        spans = receiver.take()
    return {run.concurrency: median_hops(run, spans) for run in runs}


async def run_hops(stack: NullStack, running: int, num_steps: int) -> HopRun:
    """A run that notes when the tokens of each step were there."""
    run = HopRun(running, time.time_ns())
    async for deltas in decode(stack, running, num_tokens(num_steps)):
        run.session.append((deltas.step, time.time_ns()))
    run.ended = time.time_ns()
    return run


def show(*parts: str) -> None:
    """Prints parts of the report."""
    print("\n\n".join(parts), end="\n\n", flush=True)


def tell(line: str) -> None:
    """Shows progress."""
    print(f"{time.strftime('%H:%M:%S')}  {line}", file=sys.stderr, flush=True)


def parse_options(argv: Sequence[str]) -> Options:
    """The command line. Ends the process with one sentence when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description="Measure what a step costs around a worker that computes nothing.",
    )
    parser.add_argument(
        "--running",
        type=_counts,
        metavar="N,N",
        help="requests that run at once (default: 64,256,1024)",
    )
    parser.add_argument("--rounds", type=_count, help="rounds of each (default: 5)")
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that it works, no more"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parsed = parser.parse_args(argv)
    return Options(
        running=parsed.running or ((8,) if parsed.quick else (64, 256, 1024)),
        num_steps=40 if parsed.quick else 300,
        num_rounds=parsed.rounds or (1 if parsed.quick else 5),
        json_file=parsed.json,
    )


def _words(found: Round) -> str:
    spent = ", ".join(f"{name} {micros:.0f}" for name, micros in found.processor_micros.items())
    ratio = "" if found.ratio is None else f"; {found.ratio:.4f} of the bare loop"
    return f"{statistics.median(found.step_micros):.0f} µs a step{ratio} ({spent})"


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def main() -> None:
    """Measures, prints, writes."""
    options = parse_options(sys.argv[1:])
    begun = time.monotonic()
    command = shlex.join(["python", "-m", "benchmarks.step", *sys.argv[1:]])
    try:
        results = uvloop.run(measure(options, command))
    except (RuntimeError, TimeoutError) as failed:
        tell(str(failed) or "a run did not end")
        sys.exit(1)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(results, indent=2) + "\n")
    tell(f"done after {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
