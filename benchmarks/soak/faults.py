"""Kills, stops and terminates services under full streams; fails if an answer fails or changes.

    python -m benchmarks.soak faults --faults 50 [--replicas 2] [--dtype bfloat16] [--seed 1]
                                     [--gateway]

First each request is sent alone. Then all streams run at once and without end
(benchmarks/soak/checked_streams.py) while one, two or three services at a time get SIGKILL, SIGSTOP
or SIGTERM, at once or within a second; the supervisor of `stepwell up` starts them again. Each
answer must be what it was alone: tokens, text and log-probabilities. The next fault comes after all
services have been ready again and each stream has gone on. The table of silences, in which no
stream brought a token, goes to standard output, progress to standard error; the exit status is 1 if
an answer failed, changed, or did not go on.

With --gateway the gateway is among the victims; answers that end with it are counted apart.
"""

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import uvloop

from benchmarks.common.arguments import add_model, count, make_parser
from benchmarks.common.console import log, messages
from benchmarks.common.models import vocab_size
from benchmarks.soak.checked_streams import Counts, Streams
from benchmarks.soak.replicas import Replicas
from services.cli.settings import UpSettings
from services.cli.supervisor import RestartPolicy

NUM_STREAMS = 28
NUM_PROMPT_TOKENS, NUM_TOKENS = 160, 200
RECOVERY_SECONDS = 60.0
MOST_APART_SECONDS = 1.0
CALM_SECONDS = (0.1, 1.0)
"""Between a recovery and the next fault."""
STEADY_SECONDS = 1.0
"""A service that ran for so long is not in a crash loop: faults come every few seconds."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
SHOWN_FAILURES = 10


@dataclass(frozen=True, slots=True)
class Options:
    """What to run."""

    model: Path
    num_faults: int
    num_replicas: int
    dtype: str
    seed: int
    hits_gateway: bool
    num_streams: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Signals to services, each so many seconds after the fault began."""

    hits: tuple[tuple[float, str, signal.Signals], ...]

    @property
    def kind(self) -> str:
        """The row of the table that it belongs to."""
        names = sorted(name.partition("-")[0] for _, name, _ in self.hits)
        signals = sorted({number.name for _, _, number in self.hits})
        if len(names) == 1:
            return f"{names[0]}, {signals[0]}"
        return f"{len(names)} services, {signals[0] if len(signals) == 1 else 'several signals'}"

    def __str__(self) -> str:
        return ", ".join(f"{number.name} to {name}" for _, name, number in self.hits)


@dataclass(frozen=True, slots=True)
class Effect:
    """What a fault did: seconds of silence of all streams, and the longest gap in one answer."""

    fault: Fault
    silence_seconds: float
    longest_gap_seconds: float
    recovered: bool


def draw_fault(draw: Random, names: Sequence[str]) -> Fault:
    """One, two or three services; often all get the same signal at the same time."""
    victims = draw.sample(list(names), min(draw.choice((1, 1, 1, 2, 3)), len(names)))
    first = draw.choice(SIGNALS)
    mixed, apart = draw.random() < 0.25, draw.random() < 0.5
    hits = [
        (
            draw.uniform(0, MOST_APART_SECONDS) if index and apart else 0.0,
            name,
            draw.choice(SIGNALS) if mixed else first,
        )
        for index, name in enumerate(victims)
    ]
    return Fault(tuple(sorted(hits)))


async def campaign(options: Options, directory: Path) -> tuple[list[Effect], Counts]:
    """Runs all faults under load. Raises RuntimeError if the services do not start."""
    settings = UpSettings(
        model=options.model, dtype=options.dtype, num_threads=1, replicas=options.num_replicas
    )
    steady = RestartPolicy(steady_seconds=STEADY_SECONDS)
    async with Replicas(settings, directory, steady) as replicas:
        streams = Streams(
            replicas.grpc,
            options.num_streams,
            vocab_size(options.model),
            NUM_PROMPT_TOKENS,
            options.num_tokens,
        )
        log(f"sending {options.num_streams} requests one by one")
        await streams.measure()
        load = asyncio.create_task(streams.run())
        effects = await _inject_all(options, replicas, streams)
        streams.stop()
        await load
        await streams.close()
    return effects, streams.counts


async def _inject_all(options: Options, replicas: Replicas, streams: Streams) -> list[Effect]:
    draw = Random(options.seed)
    names = [*replicas.names, *(("gateway",) if options.hits_gateway else ())]
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
            f"{streams.counts.good} answers are right, {streams.counts.failed.total()} failed, "
            f"{streams.counts.changed.total()} changed"
            + ("" if effect.recovered else "; NOT RECOVERED")
        )
    return effects


async def _inject(fault: Fault, replicas: Replicas, streams: Streams) -> Effect:
    """Sends the signals, and waits until all victims are ready again and all streams go on."""
    streams.mark()
    streams.expects_gateway_loss = any(name == "gateway" for _, name, _ in fault.hits)
    began = time.monotonic()
    hit: dict[str, tuple[int, int]] = {}
    for delay, name, number in fault.hits:
        await asyncio.sleep(max(0.0, began + delay - time.monotonic()))
        pid = replicas.pid(name)
        hit[name] = pid, replicas.record.num_ready.get(name, 0)
        with suppress(ProcessLookupError):  # It ended with another one.
            os.kill(pid, number)
    recovered = await _all_ready(hit, replicas)
    streams.expect_progress()
    recovered &= await _within(RECOVERY_SECONDS, streams.all_progressed)
    streams.expects_gateway_loss = False
    return Effect(fault, streams.silence_seconds, streams.longest_gap_seconds, recovered)


async def _all_ready(hit: dict[str, tuple[int, int]], replicas: Replicas) -> bool:
    """Whether each service that was hit has been ready again in time. One that is still the same
    process then, stopped, is killed, so that the campaign can go on.
    """
    deadline = time.monotonic() + RECOVERY_SECONDS
    record = replicas.record
    while any(record.num_ready[name] == before for name, (_, before) in hit.items()):
        record.changed.clear()
        left = deadline - time.monotonic()
        if left <= 0:
            for name, (pid, _) in hit.items():
                if replicas.pid(name) == pid:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            return False
        await _within(left, record.changed)
    return True


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def report(effects: Sequence[Effect], counts: Counts) -> str:
    """The whole report."""
    kinds: dict[str, list[Effect]] = {}
    for effect in effects:
        kinds.setdefault(effect.fault.kind, []).append(effect)
    lines = [
        "| fault | times | silence s, median / longest | longest gap in an answer s |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, found in sorted(kinds.items()):
        silences = [effect.silence_seconds for effect in found]
        gap = max(effect.longest_gap_seconds for effect in found)
        lines.append(
            f"| {kind} | {len(found)} | {statistics.median(silences):.2f} / {max(silences):.2f} "
            f"| {gap:.2f} |"
        )
    stuck = sum(not effect.recovered for effect in effects)
    lines += [
        "",
        f"{len(effects)} faults, {stuck} without recovery; {counts.good} answers are right, "
        f"{counts.failed.total()} failed, {counts.changed.total()} changed, "
        f"{counts.with_gateway} ended with the gateway",
    ]
    for what in (counts.failed, counts.changed):
        lines += [f"{times} times {text}" for text, times in what.most_common(SHOWN_FAILURES)]
    return "\n".join(lines)


def parse_options(argv: Sequence[str]) -> Options:
    """The command line. Ends the process with one sentence when it makes no sense."""
    parser = make_parser("soak faults", (__doc__ or "").partition("\n")[0])
    add_model(parser)
    add = parser.add_argument
    add("--faults", type=count, default=50, help="how many faults (default: 50)")
    add("--replicas", type=count, default=1, help="schedulers with pool and worker (default: 1)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    add("--seed", type=int, default=0, help="which faults, and when (default: 0)")
    add("--gateway", action="store_true", help="hit the gateway as well")
    add("--streams", type=count, default=NUM_STREAMS, help=f"at once (default: {NUM_STREAMS})")
    add("--tokens", type=count, default=NUM_TOKENS, help=f"of an answer (default: {NUM_TOKENS})")
    parsed = parser.parse_args(argv)
    return Options(
        parsed.model,
        parsed.faults,
        parsed.replicas,
        parsed.dtype,
        parsed.seed,
        parsed.gateway,
        parsed.streams,
        parsed.tokens,
    )


def main(argv: Sequence[str]) -> int:
    """Runs, prints, judges."""
    options = parse_options(argv)
    with tempfile.TemporaryDirectory(prefix="stepwell-faults-") as directory:
        try:
            effects, counts = uvloop.run(campaign(options, Path(directory)))
        except RuntimeError as failed:
            log("\n".join(messages(failed)))
            return 1
    print(report(effects, counts))
    good = not counts.failed and not counts.changed and all(e.recovered for e in effects)
    return 0 if good else 1
