"""Compares scheduling policies by the job times of agents' programs.

    python -m benchmarks.agents --simulated [--quick] [--ladder | --grid | --rates]
                                [--turns N] [--seeds N] [--load NAME]... [--json FILE]

A program is a sequence of requests, each of which continues the context of the previous one. A job
is a run of a program, and its time includes the pauses in which tools run. A load consists of
programs, the rate at which they arrive, and the size of the KV cache (the pool). The pressure of a
load is the total context of all live programs divided by the pool's size. The total is measured
with unlimited memory, as an average over the time in which programs arrive. A ratio in the tables
is the mean job time with the policy fcfs divided by the mean job time of the row, as a geometric
mean over the seeds.

* --ladder leaves out each rule of the policy `program` in turn.
* --grid compares `program` with fcfs and continuum-fixed. Loads are 0.3 and 0.6 of a replica's
  capacity, and pressures are 0.5 to 4.
* --rates finds the highest rate at which the mean job takes at most twice its time on an idle
  replica.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.agents.grid import grid_table, settings, summary_table
from benchmarks.agents.loads import LOADS, Load, ladder_setups, policy_setups
from benchmarks.agents.rates import highest_rates, rate_table
from benchmarks.agents.runs import compare, detail_table, document, ladder_table, ratio_table
from benchmarks.common.arguments import count, make_parser
from benchmarks.common.console import show


def main(argv: Sequence[str]) -> None:
    arguments = parse_options(argv)
    command = f"`python -m benchmarks.agents {' '.join(argv)}`."
    if arguments.grid:
        found: object = _run_grid(arguments, command)
    elif arguments.rates:
        found = _run_rates(arguments, command)
    else:
        found = _run_loads(arguments, command)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def _run_grid(arguments: argparse.Namespace, command: str) -> object:
    num_programs, seeds = (4, 1) if arguments.quick else (200, arguments.seeds)
    found = list(settings(num_programs, range(seeds), arguments.turns))
    text = "Ratios of fcfs / continuum-fixed to program, and in parentheses the pressure."
    show(f"{command} Seeds 0 to {seeds - 1}, {num_programs} programs. {text}", grid_table(found))
    show(summary_table(found))
    return [asdict(one) for one in found]


def _run_rates(arguments: argparse.Namespace, command: str) -> object:
    num_programs, seeds = (4, 1) if arguments.quick else (None, arguments.seeds)
    found = list(highest_rates(num_programs, range(seeds)))
    show(f"{command} Seeds 0 to {seeds - 1}. Programs a second.", rate_table(found))
    return [asdict(one) for one in found]


def _run_loads(arguments: argparse.Namespace, command: str) -> object:
    loads = [load for load in LOADS if load.name in arguments.load]
    num_seeds = arguments.seeds
    if arguments.quick:
        loads, num_seeds = [replace(load, num_programs=4) for load in loads], 1
    setups_of = ladder_setups if arguments.ladder else policy_setups
    comparisons = [compare(load, range(num_seeds), setups_of(load)) for load in loads]
    text = f"Seeds 0 to {num_seeds - 1}, {' or '.join(_numbers(loads))} programs."
    table = ladder_table if arguments.ladder else ratio_table
    show(f"{command} {text}", table(comparisons))
    show(detail_table(comparisons))
    return document(comparisons)


def _numbers(loads: Iterable[Load]) -> list[str]:
    return sorted({str(load.num_programs) for load in loads})


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("agents", __doc__)
    names = sorted({load.name for load in LOADS})
    add = parser.add_argument
    add("--simulated", action="store_true", required=True, help="run in simulated time")
    add("--quick", action="store_true", help="only 4 programs of each load, and one seed")
    either = parser.add_mutually_exclusive_group().add_argument
    either(
        "--ladder", action="store_true", help="measure the policy program without each of its rules"
    )
    either("--grid", action="store_true", help="all pairs of five loads, two rates, five pressures")
    either("--rates", action="store_true", help="find the rate at which jobs take twice as long")
    add("--turns", type=count, help="turns of each program of the grid (default: the load's)")
    add("--seeds", type=count, default=4, help="number of seeds (default: 4)")
    add("--load", action="append", choices=names, help="may be given several times (default: all)")
    add("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    arguments.load = arguments.load or names
    return arguments


if __name__ == "__main__":
    main(sys.argv[1:])
