"""Measures goodput and refusals under more load than the services can serve.

    python -m benchmarks.soak overload [--seconds S] [--factor N] [--deadline-seconds S]
                                       [--tenants N] [--model DIR]
                                       [-- FLAG OF STEPWELL UP...]

1. Capacity: a closed loop. The number of clients is the number of requests that can run at once,
   and each client sends its next request as soon as the previous one is done.
2. Overload: an open loop, at a multiple of the request rate measured in part 1. Each request has a
   deadline, at which its client cancels it. Goodput counts the tokens of requests that were done by
   their deadlines. The time of a refusal is from sending the request to receiving the refusal.
   Requests that were evicted from the queue before their first step are counted separately.

Services and clients share one machine and its processors. Arguments after `--` are flags of
`stepwell up`, such as `-- --num-threads 1 --worker-niceness 5`. These flags apply to every part.
With `--tenants 2` one of two tenants sends the overload. `benchmarks.soak.overload_tenants`
describes this measurement. The exit status is 1 if one of its figures misses its goal.
"""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.common.arguments import add_model, count, make_parser, positive, split_flags
from benchmarks.common.figures import percentile
from benchmarks.common.stack import Stack
from benchmarks.soak import overload_report, overload_tenants
from benchmarks.soak.load_generator import Sending, Sent, send
from benchmarks.soak.overload_tenants import TenantOptions
from services.cli.settings import UpSettings
from services.common.process.settings import SettingError, parse_settings

_EVICTED = "queue_timeout"


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the measurement."""

    model: Path
    seconds: float
    factor: float
    deadline_seconds: float
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    tenants: int
    quiet_share: float
    recovery_seconds: float
    rounds: int
    services: UpSettings
    """Settings of the measured services."""


async def measure(options: Options) -> tuple[Sent, Sent]:
    async with Stack(options.services) as stack:
        seeds = itertools.count()

        def load(seconds: float, **fields: Any) -> Awaitable[Sent]:
            lengths = options.prompt_tokens, options.output_tokens
            return send(Sending(stack.http, "", seconds, *lengths, seed=next(seeds), **fields))

        # A warm-up, because the first steps of each batch size take longer.
        await load(options.seconds / 4, concurrency=options.concurrency)
        capacity = await load(options.seconds, concurrency=options.concurrency)
        rate = options.factor * capacity.num_done / capacity.seconds
        deadline_seconds = options.deadline_seconds
        return capacity, await load(options.seconds, rate=rate, deadline_seconds=deadline_seconds)


def report(options: Options, capacity: Sent, overload: Sent) -> str:
    full, good = (
        part.num_done * options.output_tokens / part.seconds for part in (capacity, overload)
    )
    lines = [
        f"| {options.factor:g} times the load, deadline {options.deadline_seconds:g} s | |",
        "| --- | ---: |",
        f"| capacity, tokens/s | {full:.0f} |",
        f"| goodput, tokens/s | {good:.0f} |",
        f"| goodput to capacity | {good / full:.2f} |",
        f"| requests sent / done / refused | {overload.num_sent} / {overload.num_done} / "
        f"{len(overload.refusal_millis)} |",
    ]
    if overload.refusal_millis:
        median, slow = (percentile(overload.refusal_millis, percent) for percent in (50, 99))
        lines.append(f"| refusals, ms, median / p99 | {median:.1f} / {slow:.1f} |")
    for name, number in sorted(overload.other.items()):
        lines.append(f"| {'evicted from the queue' if name == _EVICTED else name} | {number} |")
    return "\n".join(lines)


def parse_options(argv: Sequence[str]) -> Options:
    parser = make_parser("soak overload", __doc__)
    add_model(parser)
    parser.add_argument(
        "--tenants",
        type=int,
        choices=(1, 2),
        default=1,
        help="number of tenants; with 2, one of them sends too many requests",
    )
    flags: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
        ("--seconds", positive, 20.0, "length of each part"),
        ("--factor", positive, 10.0, "load, as a multiple of capacity"),
        ("--deadline-seconds", positive, 5.0, "seconds after which clients cancel their requests"),
        ("--concurrency", count, 32, "requests that run at once"),
        ("--prompt-tokens", count, 32, "length of each prompt"),
        ("--output-tokens", count, 128, "length of each answer"),
        (
            "--quiet-share",
            positive,
            0.5,
            "fraction of its fair share that the quiet tenant requests",
        ),
        (
            "--recovery-seconds",
            positive,
            5.0,
            "seconds to wait after a flood, before normal load is measured again",
        ),
        ("--rounds", count, 1, "number of rounds of all parts, with two tenants"),
    )
    for name, kind, default, text in flags:
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default: {default})")
    own, up_flags = split_flags(argv)
    parsed = vars(parser.parse_args(own))
    of_load = ["--model", str(parsed["model"]), "--max-num-seqs", str(parsed["concurrency"])]
    try:
        services = parse_settings(UpSettings, "up", [*of_load, *up_flags], {})
    except SettingError as error:
        parser.error(str(error))
    return Options(services=services, **parsed)


def _measure_tenants(options: Options) -> int:
    wanted = TenantOptions(
        **{field.name: getattr(options, field.name) for field in fields(TenantOptions)}
    )
    lines = overload_report.lines_of(wanted, uvloop.run(overload_tenants.measure(wanted)))
    print(overload_report.report(wanted, lines))
    return int(any(line.passed is False for line in lines))


def main(argv: Sequence[str]) -> int:
    """Measures and prints the figures. With two tenants, returns 1 if a figure misses its goal."""
    options = parse_options(argv)
    if options.tenants > 1:
        return _measure_tenants(options)
    print(report(options, *uvloop.run(measure(options))))
    return 0
