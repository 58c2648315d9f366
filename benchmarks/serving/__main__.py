"""`make bench`: measures the cost of serving through separate services, and its causes.

    python -m benchmarks.serving [--quick] [--model DIR|15m|135m|1.1b]... [--concurrency 1,8,32]
                                 [--json FILE]
                                 [--baseline DIR | --tracing | --stages | --structured]

For each model the same load is sent to three targets: the four services over gRPC, the four
services over HTTP with server-sent events, and one process that contains the code of all services.
Runs on the targets alternate, so that other work on the machine affects all of them. Then the
durations of a step's hops (parts, such as its planning or the transfer of its tokens) are measured.
The cost of tracing is measured with the first model. Tables go to standard output, progress to
standard error.

With --baseline the services are compared with the services of another checkout. Each checkout's
services are started by its own `stepwell up`. With --tracing only the cost of tracing is measured,
in longer and more runs. The runs alternate between trace ratios of 0, 1 % and 100 %. With --stages
one worker is compared with two pipeline stages, each of which computes with one thread. With
--structured, a load is measured while as many other requests run. In every second run, these other
requests are constrained to a JSON schema.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common.arguments import checkout, counts, is_model, make_parser
from benchmarks.common.models import RANDOM_MODELS
from benchmarks.common.runs import run_measurement
from benchmarks.serving.comparison import Schedule
from benchmarks.serving.measurement import Options, Part, measure

DEFAULT_MODELS = ("models/demo", "135m")
SCHEDULE = Schedule((1, 8, 32), num_rounds=5, requests_each=3, prompt_tokens=128, output_tokens=64)
TRACING = replace(SCHEDULE, num_rounds=40, requests_each=96, level_seconds=240)
QUICK = Schedule((1, 4), num_rounds=1, requests_each=1, prompt_tokens=32, output_tokens=8)


def parse_options(argv: Sequence[str]) -> Options:
    parser = make_parser(
        "serving", "Compares serving by separate services with serving in one process."
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
        type=counts,
        metavar="N,N",
        help="numbers of concurrent requests (default: 1,8,32)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run one short round, only to check that the benchmark works",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures to this file"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--tracing",
        action="store_const",
        const=Part.TRACING,
        dest="only",
        help="measure only the cost of tracing, in more rounds",
    )
    only.add_argument(
        "--baseline",
        type=checkout,
        metavar="DIR",
        help="compare with the services of another checkout of Stepwell that has generated code "
        "in gen/",
    )
    only.add_argument(
        "--stages",
        action="store_const",
        const=Part.STAGES,
        dest="only",
        help="compare one worker with two pipeline stages, with one thread each",
    )
    only.add_argument(
        "--structured",
        action="store_const",
        const=Part.STRUCTURED,
        dest="only",
        help="measure only how much requests with a JSON schema slow other requests",
    )
    parsed = parser.parse_args(argv)
    schedule = QUICK if parsed.quick else TRACING if parsed.only is Part.TRACING else SCHEDULE
    models = tuple(parsed.model or (DEFAULT_MODELS[:1] if parsed.quick else DEFAULT_MODELS))
    for model in models:
        if model not in RANDOM_MODELS and not is_model(model):
            parser.error(f"{model} is neither a model directory nor one of {RANDOM_MODELS}")
    return Options(
        models=models,
        schedule=replace(schedule, concurrencies=parsed.concurrency or schedule.concurrencies),
        trace_ratios=(1.0,) if parsed.quick else (0.01, 1.0),
        json_file=parsed.json,
        baseline=parsed.baseline,
        only=parsed.only,
    )


def main(argv: Sequence[str]) -> None:
    options = parse_options(argv)
    run_measurement("serving", argv, partial(measure, options), options.json_file)


if __name__ == "__main__":
    main(sys.argv[1:])
