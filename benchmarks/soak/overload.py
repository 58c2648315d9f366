"""Measures goodput and refusals under more load than the services can serve.

    python -m benchmarks.soak overload [--seconds S] [--factor N] [--deadline-seconds S]
                                       [--api http|grpc] [--tenants N] [--model DIR]
                                       [-- FLAG OF STEPWELL UP...]

1. Capacity: a closed loop. The number of clients is the number of requests that can run at once,
   and each client sends its next request as soon as the previous one is done.
2. Overload: an open loop, at a multiple of the request rate measured in part 1. Each request has a
   deadline, at which its client cancels it. Goodput counts the tokens of requests that were done by
   their deadlines. Refusals are timed from sending to the answer. Requests that were queued and
   then evicted before their first step are counted separately.

Services and clients share one machine and its processors. Arguments after `--` are flags of
`stepwell up`, such as `-- --num-threads 1 --worker-niceness 5`; they apply to every part. With
`--tenants 2` one of two tenants sends the overload, over HTTP: `benchmarks.soak.overload_tenants`
describes what is measured, and the exit status is 1 if a figure misses its goal.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from pathlib import Path

import uvloop

from benchmarks.common.arguments import add_model, count, make_parser, positive, split_flags
from benchmarks.common.figures import percentile
from benchmarks.common.stack import Stack
from benchmarks.soak import overload_report, overload_tenants
from benchmarks.soak.overload_clients import DONE, REFUSED, GrpcSender, HttpSender, Sender
from benchmarks.soak.overload_tenants import TenantOptions
from services.cli.settings import UpSettings
from services.common.process.settings import SettingError, parse_settings

VOCAB_SIZE = 256
"""Token ids of prompts are below this number. Every model's vocabulary is at least as large."""


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the measurement."""

    model: Path
    api: str
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


@dataclass(slots=True)
class Outcome:
    """The outcomes of the requests of one part."""

    seconds: float = 0.0
    num_sent: int = 0
    num_done: int = 0
    refusal_millis: list[float] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)
    """Maps each error to the number of requests that were neither done nor refused at once."""

    def tokens_per_second(self, options: Options) -> float:
        """Output tokens per second of the requests that were done."""
        return self.num_done * options.output_tokens / self.seconds


class Clients:
    """Sends requests and records their outcomes."""

    def __init__(self, sender: Sender, options: Options) -> None:
        self._sender = sender
        self._options = options
        self._random = random.Random(0)

    async def capacity(self, seconds: float) -> Outcome:
        """Runs a closed loop for `seconds`."""
        outcome, until = Outcome(), time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < until:
                await self._send(outcome, None)

        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._options.concurrency):
                tasks.create_task(client())
        outcome.seconds = time.monotonic() - began
        return outcome

    async def overload(self, seconds: float, rate: float) -> Outcome:
        """Runs an open loop of `rate` requests per second."""
        outcome, began = Outcome(), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while (passed := time.monotonic() - began) < seconds:
                for _ in range(outcome.num_sent, int(passed * rate)):
                    outcome.num_sent += 1
                    tasks.create_task(self._send(outcome, self._options.deadline_seconds))
                await asyncio.sleep(0.005)
        outcome.seconds = time.monotonic() - began
        return outcome

    async def _send(self, outcome: Outcome, deadline_seconds: float | None) -> None:
        prompt = self._random.choices(range(VOCAB_SIZE), k=self._options.prompt_tokens)
        sent = time.monotonic()
        result = await self._sender.send(prompt, self._options.output_tokens, deadline_seconds)
        if result == DONE:
            outcome.num_done += 1
        elif result == REFUSED:
            outcome.refusal_millis.append(1000 * (time.monotonic() - sent))
        else:
            outcome.other[result] += 1


async def measure(options: Options) -> tuple[Outcome, Outcome]:
    """Starts services and measures capacity, then overload."""
    async with Stack(options.services) as stack:
        grpc = options.api == "grpc"
        sender = GrpcSender(stack.grpc) if grpc else HttpSender(stack.http)
        async with aclosing(sender):
            clients = Clients(sender, options)
            await clients.capacity(options.seconds / 4)  # the first steps of each size take longer
            capacity = await clients.capacity(options.seconds)
            rate = options.factor * capacity.num_done / capacity.seconds
            return capacity, await clients.overload(options.seconds, rate)


def report(options: Options, capacity: Outcome, overload: Outcome) -> str:
    """The figures, as a table."""
    full, good = capacity.tokens_per_second(options), overload.tokens_per_second(options)
    lines = [
        f"| {options.factor:g} times the load over {options.api}, "
        f"deadline {options.deadline_seconds:g} s | |",
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
    lines += [f"| {name} | {count} |" for name, count in sorted(overload.other.items())]
    return "\n".join(lines)


def parse_options(argv: Sequence[str]) -> Options:
    """Parses the command line. Ends the process with an error message if it is invalid."""
    parser = make_parser("soak overload", (__doc__ or "").partition("\n")[0])
    add_model(parser)
    parser.add_argument(
        "--api", choices=("http", "grpc"), default="http", help="API that clients use"
    )
    parser.add_argument(
        "--tenants", type=int, choices=(1, 2), default=1, help="with 2, one of them floods"
    )
    flags: tuple[tuple[str, Callable[[str], float], float, str], ...] = (
        ("--seconds", positive, 20.0, "length of each part"),
        ("--factor", positive, 10.0, "load, as a multiple of capacity"),
        ("--deadline-seconds", positive, 5.0, "after which clients cancel"),
        ("--concurrency", count, 32, "requests that run at once"),
        ("--prompt-tokens", count, 32, "length of each prompt"),
        ("--output-tokens", count, 128, "length of each answer"),
        ("--quiet-share", positive, 0.5, "what the quiet tenant asks for, of its fair share"),
        (
            "--recovery-seconds",
            positive,
            5.0,
            "after a flood, before what is normal is measured",
        ),
        ("--rounds", count, 1, "of all parts, with two tenants"),
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
