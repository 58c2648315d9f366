"""Kills and pauses services while all streams run. The test fails if an answer fails or changes.

    python -m benchmarks.soak faults [--faults 50] [--replicas 2] [--dtype bfloat16] [--seed 1]

First each request is sent alone. Then all streams run concurrently and without end
(benchmarks/soak/checked_streams.py) while services get signals. The supervisor of `stepwell up`
restarts the services. Each answer must have the same tokens, text and log-probabilities as the
answer to the same request when it was sent alone.

* By default, faults are separated by recoveries. In a fault, one, two or three services get
  SIGKILL, SIGSTOP or SIGTERM, at the same time or within a second. The next fault is injected when
  all services are ready again and each stream has received a token. The table shows the silence of
  each fault, which is the longest time in which no stream received a token.
* With --every, a random running service gets SIGKILL or SIGSTOP every so many seconds, even if
  earlier victims have not recovered. This continues for --seconds. The supervisor's delays before
  restarts grow as usual. At the end every block must be free again.

Tables go to standard output, progress to standard error. The exit status is 1 if an answer failed,
changed or stopped, or if a block or request was left. With --gateway the gateways are among the
victims. Answers that end with a gateway are counted separately.
"""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

from benchmarks.common.arguments import add_model, count, make_parser, positive
from benchmarks.common.console import log
from benchmarks.common.models import vocab_size
from benchmarks.common.process_usage import is_running
from benchmarks.common.runs import run_program
from benchmarks.soak.checked_streams import Streams
from benchmarks.soak.fault_draws import Fault, draw_fault, draw_hit
from benchmarks.soak.fault_report import Effect, report, storm_report
from benchmarks.soak.left_over import settle
from benchmarks.soak.replicas import LOG_NAME, RECOVERY_SECONDS, Replicas
from services.cli.processes.supervisor import RestartPolicy
from services.cli.settings import UpSettings

NUM_STREAMS = 28
NUM_PROMPT_TOKENS, NUM_TOKENS = 160, 200
CALM_SECONDS = (0.1, 1.0)
"""The minimum and maximum of the random pause between a recovery and the next fault."""
STEADY_SECONDS = 1.0
"""A restarted service counts as stable after these seconds, so that its next crash does not count
as a repeated one. Used if faults are separated by recoveries.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the run. `every_seconds` is the interval between faults. If it is None,
    each fault is injected after the recovery from the one before.
    """

    model: Path
    num_faults: int
    every_seconds: float | None
    seconds: float
    num_replicas: int
    num_gateways: int
    dtype: str
    seed: int
    hits_gateway: bool
    num_streams: int
    num_tokens: int
    log_file: Path | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report on all faults of a run, and whether all answers were correct."""

    report: str
    is_good: bool


async def campaign(options: Options, directory: Path) -> Outcome:
    """Runs all faults under load. Raises RuntimeError if the services do not start."""
    settings = UpSettings(
        model=options.model, dtype=options.dtype, num_threads=1, replicas=options.num_replicas
    )
    is_storm = options.every_seconds is not None
    restarts = RestartPolicy() if is_storm else RestartPolicy(steady_seconds=STEADY_SECONDS)
    services = Replicas(settings, directory, restarts, num_gateways=options.num_gateways)
    async with services as replicas:
        streams = Streams(
            [gateway.grpc for gateway in replicas.gateways],
            options.num_streams,
            vocab_size(options.model),
            NUM_PROMPT_TOKENS,
            options.num_tokens,
        )
        log(f"sending {options.num_streams} requests one by one")
        await streams.measure()
        load = asyncio.create_task(streams.run())
        run = _storm if is_storm else _one_by_one
        outcome = await run(options, replicas, streams, load)
        await streams.close()
    return outcome


# Faults that are separated by recoveries.


async def _one_by_one(
    options: Options, replicas: Replicas, streams: Streams, load: "asyncio.Task[None]"
) -> Outcome:
    draw = Random(options.seed)
    names = _victims(options, replicas)
    effects = []
    streams.mark()
    await _within(RECOVERY_SECONDS, streams.all_progressed)
    for number in range(options.num_faults):
        await asyncio.sleep(draw.uniform(*CALM_SECONDS))
        effect = await _inject(draw_fault(draw, names), replicas, streams)
        effects.append(effect)
        log(
            f"{number + 1}/{options.num_faults}: {effect.fault}: silence "
            f"{effect.silence_seconds:.2f} s, longest gap {effect.longest_gap_seconds:.2f} s; "
            f"{streams.counts}" + ("" if effect.recovered else "; NOT RECOVERED")
        )
    await _end(streams, load)
    good = streams.counts.are_good and all(effect.recovered for effect in effects)
    return Outcome(report(effects, streams.counts), good)


async def _inject(fault: Fault, replicas: Replicas, streams: Streams) -> Effect:
    """Sends the signals, and waits until all victims are ready again and all streams progress."""
    streams.mark()
    streams.expects_gateway_loss = any(_is_gateway(name) for _, name, _ in fault.hits)
    began = time.monotonic()
    hit: dict[str, tuple[int, int]] = {}
    for delay, name, number in fault.hits:
        await asyncio.sleep(max(0.0, began + delay - time.monotonic()))
        hit[name] = replicas.pid(name), replicas.record.num_ready.get(name, 0)
        _send(number, name, replicas)
    recovered = await _all_ready(hit, replicas)
    streams.expect_progress()
    recovered &= await _within(RECOVERY_SECONDS, streams.all_progressed)
    streams.expects_gateway_loss = False
    return Effect(fault, streams.silence_seconds, streams.longest_gap_seconds, recovered)


async def _all_ready(hit: dict[str, tuple[int, int]], replicas: Replicas) -> bool:
    """Waits until all killed or stopped services are ready again. Returns whether they were ready
    in time.

    A service that is not ready in time, and is still the same stopped process, is killed, so that
    the campaign can continue.
    """
    deadline = time.monotonic() + RECOVERY_SECONDS
    record = replicas.record
    while any(record.num_ready[name] == before for name, (_, before) in hit.items()):
        record.changed.clear()
        left = deadline - time.monotonic()
        if left <= 0:
            for name, (pid, _) in hit.items():
                if replicas.pid(name) == pid:
                    _send(signal.SIGKILL, name, replicas)
            return False
        await _within(left, record.changed)
    return True


# Faults at fixed intervals.


async def _storm(
    options: Options, replicas: Replicas, streams: Streams, load: "asyncio.Task[None]"
) -> Outcome:
    assert options.every_seconds is not None
    draw = Random(options.seed)
    names = _victims(options, replicas)
    streams.expects_gateway_loss = options.hits_gateway
    streams.mark()
    await _within(RECOVERY_SECONDS, streams.all_progressed)
    began = time.monotonic()
    faults: list[Fault] = []
    while (due := len(faults) * options.every_seconds) < options.seconds:
        await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        running = [name for name in names if is_running(replicas.pid(name))]
        fault = draw_hit(draw, running or names)
        ((_, name, number),) = fault.hits
        _send(number, name, replicas)
        faults.append(fault)
        log(f"{time.monotonic() - began:5.1f} s: {fault}; {streams.counts}")
    await _end(streams, load)
    async with httpx.AsyncClient(trust_env=False) as http:
        left_over = await settle(http, replicas.http, RECOVERY_SECONDS)
    good = streams.counts.are_good and not left_over
    return Outcome(storm_report(faults, streams.counts, left_over), good)


# Shared by both kinds of campaigns.


def _victims(options: Options, replicas: Replicas) -> list[str]:
    gateways = [gateway.spec.name for gateway in replicas.gateways]
    return [*replicas.names, *(gateways if options.hits_gateway else ())]


def _is_gateway(name: str) -> bool:
    return name.startswith("gateway")


def _send(number: signal.Signals, name: str, replicas: Replicas) -> None:
    with suppress(ProcessLookupError):  # the process has ended
        os.kill(replicas.pid(name), number)


async def _end(streams: Streams, load: "asyncio.Task[None]") -> None:
    """Starts no more requests, and waits for the running answers, all of which have deadlines."""
    streams.stop()
    await load


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def parse_options(argv: Sequence[str]) -> Options:
    parser = make_parser("soak faults", __doc__)
    add_model(parser)
    add = parser.add_argument
    add("--faults", type=count, default=50, help="number of successive faults (default: 50)")
    add("--every", type=positive, help="seconds between faults, without waiting for recovery")
    add("--seconds", type=positive, default=60.0, help="duration with --every (default: 60)")
    add("--replicas", type=count, default=1, help="schedulers, with pool and worker (default: 1)")
    add("--gateways", type=count, default=1, help="number of gateways (default: 1)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    add("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    add("--gateway", action="store_true", help="inject faults into the gateways too")
    add(
        "--streams",
        type=count,
        default=NUM_STREAMS,
        help=f"requests at once (default: {NUM_STREAMS})",
    )
    add(
        "--tokens",
        type=count,
        default=NUM_TOKENS,
        help=f"tokens per answer (default: {NUM_TOKENS})",
    )
    add("--log", type=Path, metavar="FILE", help="file for the services' logs")
    parsed = parser.parse_args(argv)
    return Options(
        parsed.model,
        parsed.faults,
        parsed.every,
        parsed.seconds,
        parsed.replicas,
        parsed.gateways,
        parsed.dtype,
        parsed.seed,
        parsed.gateway,
        parsed.streams,
        parsed.tokens,
        parsed.log,
    )


def main(argv: Sequence[str]) -> int:
    """Runs the campaign and prints the report. Returns 1 if it failed."""
    options = parse_options(argv)
    with tempfile.TemporaryDirectory(prefix="stepwell-faults-") as directory:
        try:
            outcome = run_program(campaign(options, Path(directory)))
        finally:
            if options.log_file is not None:
                shutil.copy(Path(directory) / LOG_NAME, options.log_file)
    print(outcome.report)
    return 0 if outcome.is_good else 1
