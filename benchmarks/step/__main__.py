"""Measures the overhead of a step. All services are real, but the worker computes nothing.

    python -m benchmarks.step [--quick] [--running 64,256,1024] [--rounds N] [--json FILE]

A client has one session (stream) with the scheduler, as a gateway does. `--running` requests decode
at the same time, and in each step one request in sixteen needs a new block. If the worker's step is
empty, the time between steps is only overhead. If the worker's step takes 5 ms, the overhead should
overlap with it. The worker should then run as many steps per second as in a bare loop, which runs
the same steps in the worker's process without requests. Tables go to standard output, progress to
standard error.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import count, counts, make_parser
from benchmarks.common.console import log, show
from benchmarks.common.hops import HopRun, hops_table, median_hops
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.runs import run_measurement
from benchmarks.common.spans import SpanReceiver
from benchmarks.step import tables
from benchmarks.step.dummy_replica import DummyReplica, ReplicaOptions
from benchmarks.step.rounds import Round, StepRow, decode, num_blocks, num_tokens, row, run_round

EMPTY, STEP_MILLIS = 0.0, 5.0
TRACE_RATIO = 0.1
MODES = {"async": True, "sync": False}


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the measurement."""

    running: tuple[int, ...]
    num_steps: int
    num_rounds: int
    json_file: Path | None

    def replica(self, *, async_scheduling: bool, otlp_endpoint: str = "") -> ReplicaOptions:
        """The options of a replica that can run the largest number of requests."""
        most = max(self.running)
        return ReplicaOptions(
            max_num_seqs=most,
            num_blocks=num_blocks(most, self.num_steps),
            async_scheduling=async_scheduling,
            otlp_endpoint=otlp_endpoint,
            trace_sample_ratio=TRACE_RATIO,
        )


async def measure(options: Options, command: str) -> dict[str, Any]:
    """Measures everything, and prints each table when it is complete. Returns all figures."""
    found = machine()
    show(machine_text(found, command))
    async with AsyncExitStack() as scope:
        replicas = {}
        for mode, asynchronous in MODES.items():
            log(f"starting a replica, {mode}")
            replica = DummyReplica(options.replica(async_scheduling=asynchronous))
            replicas[mode] = await scope.enter_async_context(replica)
        empty = await measure_steps(options, replicas, EMPTY)
        show("### An empty step", tables.overhead_table(empty), tables.OVERHEAD_NOTE)
        filled = await measure_steps(options, replicas, STEP_MILLIS)
        title = f"### A step of {STEP_MILLIS:g} ms"
        show(title, tables.hidden_table(filled), tables.HIDDEN_NOTE)
    hops = await measure_hops(options)
    show("### An empty step, hop by hop, sync", hops_table(hops))
    rows = [asdict(found_row) for found_row in (*empty, *filled)]
    return {"command": command, "machine": found, "rows": rows, "hops": hops}


async def measure_steps(
    options: Options, replicas: Mapping[str, DummyReplica], step_millis: float
) -> list[StepRow]:
    """Measures every number of running requests. The scheduling modes run in alternation."""
    rows: list[StepRow] = []
    for running in options.running:
        rounds: dict[str, list[Round]] = defaultdict(list)
        for _ in range(options.num_rounds):
            for mode, replica in replicas.items():
                found = await run_round(replica, running, options.num_steps, step_millis)
                rounds[mode].append(found)
                log(f"{running:>5} running, {mode}: {_summary(found)}")
        rows += [row(running, mode, step_millis, rounds[mode]) for mode in replicas]
    return rows


async def measure_hops(options: Options) -> dict[int, dict[str, float | None]]:
    """Measures the hops (parts) of a step without asynchronous scheduling. Traces every tenth."""
    runs: list[HopRun] = []
    async with SpanReceiver() as receiver:
        traced = options.replica(async_scheduling=False, otlp_endpoint=receiver.endpoint)
        async with DummyReplica(traced) as replica:
            await replica.set_step(EMPTY, 0)
            receiver.keep()
            for running in options.running:
                log(f"{running:>5} running, hop by hop")
                runs.append(await run_hops(replica, running, options.num_steps))
        # Services send their remaining spans when they stop.
        spans = receiver.take()
    return {run.concurrency: median_hops(run, spans) for run in runs}


async def run_hops(replica: DummyReplica, running: int, num_steps: int) -> HopRun:
    """Runs `running` requests, and records when the tokens of each step arrive."""
    run = HopRun(running, time.time_ns())
    async for deltas in decode(replica, running, num_tokens(num_steps)):
        run.session.append((deltas.step, time.time_ns()))
    run.ended = time.time_ns()
    return run


def parse_options(argv: Sequence[str]) -> Options:
    parser = make_parser("step", "Measures the cost of a step with a worker that computes nothing.")
    parser.add_argument(
        "--running",
        type=counts,
        metavar="N,N",
        help="requests that run at once (default: 64,256,1024)",
    )
    parser.add_argument("--rounds", type=count, help="rounds of each (default: 5)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run one short round, only to check that the benchmark works",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures to this file"
    )
    parsed = parser.parse_args(argv)
    return Options(
        running=parsed.running or ((8,) if parsed.quick else (64, 256, 1024)),
        num_steps=40 if parsed.quick else 300,
        num_rounds=parsed.rounds or (1 if parsed.quick else 5),
        json_file=parsed.json,
    )


def _summary(found: Round) -> str:
    spent = ", ".join(f"{name} {micros:.0f}" for name, micros in found.processor_micros.items())
    ratio = "" if found.ratio is None else f"; {found.ratio:.4f} of the bare loop"
    return f"{statistics.median(found.step_micros):.0f} µs a step{ratio} ({spent})"


def main(argv: Sequence[str]) -> None:
    options = parse_options(argv)
    run_measurement("step", argv, partial(measure, options), options.json_file)


if __name__ == "__main__":
    main(sys.argv[1:])
