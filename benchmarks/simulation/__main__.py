"""Measures the processor time of `stepwell simulate` for several numbers of replicas.

    python -m benchmarks.simulation [--replicas 1,10,100,1000] [--requests N] [--profile NAME]
                                    [--json FILE]

The workload is `chat`. The request rate of a replica is a million requests an hour divided by 1,000
replicas. Processor time is measured from the end of the first quarter of the programs, before which
the replicas are not yet busy, to the end of the last program. The table shows the time per request
and per decision. A decision is a planned step or the choice of a replica for a request. The start,
the first quarter and the final check are shown in a separate column. Tables go to standard output,
progress to standard error.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.arguments import count, counts, make_parser
from benchmarks.common.console import log, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.tables import table_text
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import SchedulerOutput
from services.simulation.laboratory.replica import SimulatedReplica
from services.simulation.laboratory.run import Setup, simulate
from services.simulation.laboratory.workloads import Traffic, generate
from services.worker.core.step_times import StepTimes
from services.worker.profiles.profile import MeasuredProfile, read_profile

REQUESTS_PER_REPLICA_SECOND = 1e6 / 3600 / 1000
REQUESTS_PER_PROGRAM = 2.0
"""The mean number of turns of a program of the workload `chat`."""
KV_TOKENS, BLOCK_SIZE = 458_000, 16


@dataclass(frozen=True, slots=True)
class Cost:
    num_replicas: int
    num_requests: int
    num_decisions: int
    processor_seconds: float
    other_seconds: float
    """Processor time of the start, of the first quarter of the programs, and of the final check."""


class Meter:
    """Counts requests and planned steps. Records both counts and the processor time when the first
    quarter of the programs has ended, and when all programs have ended.
    """

    def __init__(self, num_programs: int) -> None:
        self._num_left = num_programs
        self._first = num_programs - num_programs // 4
        self._num_requests = self._num_planned = 0
        self.marks: list[tuple[int, int, float]] = []

    def planned(self, _replica: SimulatedReplica, plan: SchedulerOutput) -> None:
        self._num_planned += 1
        self._num_requests += len(plan.new)

    def ended(self) -> None:
        self._num_left -= 1
        if self._num_left in (self._first, 0):
            self.marks.append((self._num_requests, self._num_planned, time.process_time()))


def measure(num_replicas: int, num_requests: int, times: StepTimes) -> Cost:
    config = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=KV_TOKENS,
        block_size=BLOCK_SIZE,
        num_blocks=1 + KV_TOKENS // BLOCK_SIZE,
        async_scheduling=True,
    )
    num_programs = max(4, round(num_requests / REQUESTS_PER_PROGRAM))
    rate = num_replicas * REQUESTS_PER_REPLICA_SECOND / REQUESTS_PER_PROGRAM
    traffic = Traffic(num_programs, rate, seed=0, max_tokens=KV_TOKENS // 2)
    meter, began = Meter(num_programs), time.process_time()
    setup = Setup(config, times, num_replicas=num_replicas, watch=meter.planned)
    simulate(setup, generate("chat", traffic), meter.ended)
    (requests, planned, first), (all_requests, all_planned, last) = meter.marks
    num_measured = all_requests - requests
    return Cost(
        num_replicas,
        num_measured,
        num_measured + all_planned - planned,
        last - first,
        first - began + time.process_time() - last,
    )


def table(costs: Sequence[Cost]) -> str:
    return table_text(
        ("replicas", "requests", "decisions a request", "us a request", "us a decision", "other s"),
        (
            (
                f"{cost.num_replicas:,}",
                f"{cost.num_requests:,}",
                f"{cost.num_decisions / cost.num_requests:.1f}",
                f"{1e6 * cost.processor_seconds / cost.num_requests:,.0f}",
                f"{1e6 * cost.processor_seconds / cost.num_decisions:,.0f}",
                f"{cost.other_seconds:,.1f}",
            )
            for cost in costs
        ),
    )


def main(argv: Sequence[str]) -> None:
    arguments = parse_options(argv)
    profile = read_profile(arguments.profile)
    if not isinstance(profile, MeasuredProfile):
        sys.exit(f"{arguments.profile} has no step times of a model")
    found, costs = machine(), []
    for num_replicas in arguments.replicas:
        log(f"{num_replicas:,} replicas")
        costs.append(measure(num_replicas, arguments.requests, profile.times))
    show(machine_text(found, "python -m benchmarks.simulation " + " ".join(argv)), table(costs))
    if arguments.json is not None:
        figures = {"machine": found, "costs": [asdict(cost) for cost in costs]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("simulation", __doc__)
    add = parser.add_argument
    add("--replicas", type=counts, default=(1, 10, 100, 1000), help="default: 1,10,100,1000")
    add("--requests", type=count, default=20_000, help="in each run (default: 20000)")
    add("--profile", default="h100-8b", help="of the device (default: h100-8b)")
    add("--json", type=Path, help="write the figures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
