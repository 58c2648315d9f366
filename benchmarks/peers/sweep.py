"""Puts a proxy on a link between services, and tries one fault of a message after another.

    python -m benchmarks.peers --link gateway-scheduler [--faults 200] [--seconds 600] [--seed 0]
                               [--only deltas] [--grpc] [--log FILE]

One gateway has two replicas, and the proxy is on a link of the first replica. A fault drops,
repeats, delays, reorders, cuts or empties a message, breaks its call, or changes one of its fields
(benchmarks/peers/fields.py). Each fault is injected once, during a batch of requests of many kinds.
Every answer must equal the answer without faults, no process may end, and the link must carry
messages again within five seconds. Faults that no receiver can detect may change answers. They are
listed with the reasons in benchmarks/peers/undetectable.py. The exit status is 1 if a fault has a
forbidden effect.
"""

import asyncio
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.common.arguments import add_model, count, make_parser, positive
from benchmarks.common.console import log
from benchmarks.common.models import vocab_size
from benchmarks.common.runs import run_program
from benchmarks.peers.faults import Clean, Fault, Injection, Observed, faults_of
from benchmarks.peers.links import LINKS, Link
from benchmarks.peers.load import Batch
from benchmarks.peers.methods import Direction, Lane
from benchmarks.peers.proxy import BROKEN, PeerProxy
from benchmarks.peers.report import Effect, report
from benchmarks.peers.undetectable import why_undetectable
from benchmarks.soak.replicas import LOG_NAME, RECOVERY_SECONDS, Replicas
from services.cli.processes.supervisor import RestartPolicy
from services.cli.settings import UpSettings

MOST_SPARED = 6
"""The maximum number of applicable messages that are forwarded before the fault, at random."""
_LOOK_AGAIN_SECONDS = 0.02
_ENDED = re.compile(r"\S+ (ended|hangs): ")
_WARNING = re.compile(r"\S+: \S+ (warning|error|critical) ")


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of the run."""

    model: Path
    link: str
    num_faults: int
    seconds: float
    seed: int
    only: str
    over_grpc: bool
    log_file: Path | None


class Sweep:
    """Injects faults into one link."""

    def __init__(
        self, link: Link, proxy: PeerProxy, batch: Batch, log_file: Path, admin: str
    ) -> None:
        """`admin` is host:port of the gateway's administration API."""
        self._link = link
        self._proxy = proxy
        self._batch = batch
        self._log_file = log_file
        self._admin = admin
        self._answers = Lane(link.stream, Direction.RESPONSE)

    async def observe(self) -> Observed:
        """Restarts the link's stream, and records which fields its messages have."""
        observed = Observed()
        self._proxy.rule = observed
        self._proxy.break_calls()
        await self._until_carried()
        await self._batch.run()
        self._proxy.rule = Clean()
        return observed

    async def inject(self, fault: Fault, num_spared: int) -> Effect | None:
        """Injects a fault while requests run. Returns None if it applied to no message.

        If it applies to no message at first, the link's stream is restarted, because the fault may
        apply only to a stream's first messages.
        """
        logged = self._log_file.stat().st_size
        injection = self._proxy.rule = Injection(fault, num_spared)
        load = asyncio.create_task(self._batch.run())
        happened = asyncio.create_task(injection.has_happened.wait())
        await asyncio.wait({load, happened}, return_when=asyncio.FIRST_COMPLETED)
        if not happened.done():
            self._proxy.rule = injection = Injection(fault)
            happened.cancel()
            self._proxy.break_calls()
            await load
            with suppress(TimeoutError):
                await asyncio.wait_for(injection.has_happened.wait(), 1.0)
            load = asyncio.create_task(self._batch.run())
        began = time.monotonic()
        wrong = await load
        if not injection.has_happened.is_set():
            self._proxy.rule = Clean()
            return None
        self._proxy.rule = Clean()
        await self._until_carried()
        seconds = time.monotonic() - began
        lines = [
            line.partition(" ")[2]
            for line in self._log_file.read_bytes()[logged:].decode(errors="replace").splitlines()
            if BROKEN not in line
        ]
        ended = tuple(line for line in lines if _ENDED.match(line))
        warnings = tuple(line for line in lines if _WARNING.match(line))
        if wrong or why_undetectable(fault):
            await self._forget()
        return Effect(fault, ended, tuple(wrong), warnings, seconds)

    async def _forget(self) -> None:
        """Restarts the link's stream and empties the prefix caches. This removes the effects that
        no receiver can detect: wrong limits of a model, requests without a client, and wrong
        blocks.
        """
        self._proxy.break_calls()
        await self._until_carried()
        await self._batch.reset_prefix_caches(self._admin)

    async def _until_carried(self) -> None:
        """Sends requests until the stream carries a message, for at most RECOVERY_SECONDS"""
        before = self._proxy.num_messages.get(self._answers, 0)
        deadline = time.monotonic() + RECOVERY_SECONDS
        while self._proxy.num_messages.get(self._answers, 0) == before:
            if time.monotonic() > deadline:
                return
            await self._batch.run()
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def sweep(options: Options, directory: Path) -> tuple[str, bool]:
    """Injects faults until all were tried or the time is over. Returns the report, and whether no
    fault had a forbidden effect. Raises RuntimeError if the services do not start.
    """
    link = LINKS[options.link]
    socket = f"unix:{directory / link.callee}.sock"
    proxy = PeerProxy(socket)
    address = await proxy.start("127.0.0.1:0" if options.over_grpc else f"unix:{directory}/proxy")
    settings = UpSettings(
        model=options.model,
        num_threads=1,
        replicas=2,
        routing_policy="round-robin",
        kv_cache_memory_bytes=64 * 2**20,
    )
    rewire = link.through(socket, address)
    restarts = RestartPolicy(steady_seconds=1.0)
    try:
        async with Replicas(settings, directory, restarts, rewire=rewire) as replicas:
            batch = Batch(replicas.http, replicas.grpc, vocab_size(options.model))
            await batch.measure()
            assert replicas.admin is not None
            run = Sweep(link, proxy, batch, directory / LOG_NAME, replicas.admin)
            return await _try_all(run, options)
    finally:
        await proxy.close()


async def _try_all(run: Sweep, options: Options) -> tuple[str, bool]:
    draw = Random(options.seed)
    observed = await run.observe()
    lanes = sorted(observed.present, key=str)
    faults = [
        fault
        for lane in lanes
        for fault in faults_of(lane)
        if options.only in str(fault) and _may_be_found(fault, observed)
    ]
    draw.shuffle(faults)
    num_found = len(faults)
    faults = faults[: options.num_faults]
    log(f"{len(faults)} of {num_found} faults of {', '.join(map(str, lanes))}")
    effects: list[Effect] = []
    num_tried, deadline = 0, time.monotonic() + options.seconds
    for fault in faults:
        if time.monotonic() > deadline:
            break
        num_tried += 1
        try:
            effect = await run.inject(fault, draw.randrange(MOST_SPARED))
        except TimeoutError as error:
            raise TimeoutError(
                f"{fault}: requests did not end, or blocks were not freed"
            ) from error
        if effect is not None:
            effects.append(effect)
            mark = "BAD " if effect.is_bad else ""
            log(f"{num_tried}/{len(faults)}: {mark}{effect}")
    text = report(effects, num_tried - len(effects), num_tried)
    return text, not any(effect.is_bad for effect in effects)


def _may_be_found(fault: Fault, observed: Observed) -> bool:
    """Whether the message that has the fault's field, possibly nested, was observed on the link."""
    above = fault.path[:-1]
    return not above or above in observed.present[fault.lane]


def parse_options(argv: Sequence[str]) -> Options:
    parser = make_parser("peers", __doc__)
    add_model(parser)
    add = parser.add_argument
    add("--link", choices=sorted(LINKS), required=True, help="link of the fault-injecting proxy")
    add("--faults", type=count, default=10_000, help="limit on faults (default: all)")
    add("--seconds", type=positive, default=3600.0, help="time limit (default: 3600)")
    add("--seed", type=int, default=0, help="seed of the order and times of the faults")
    add("--only", default="", metavar="TEXT", help="only faults whose name contains this text")
    add("--grpc", action="store_true", help="use gRPC's transport, not local streams")
    add("--log", type=Path, metavar="FILE", help="file for the services' logs")
    parsed = parser.parse_args(argv)
    return Options(
        parsed.model,
        parsed.link,
        parsed.faults,
        parsed.seconds,
        parsed.seed,
        parsed.only,
        parsed.grpc,
        parsed.log,
    )


def main(argv: Sequence[str]) -> int:
    """Runs the sweep and prints the report. Returns 1 if a fault had a forbidden effect."""
    options = parse_options(argv)
    with tempfile.TemporaryDirectory(prefix="stepwell-peers-") as directory:
        try:
            text, is_good = run_program(sweep(options, Path(directory)))
        finally:
            if options.log_file is not None:
                shutil.copy(Path(directory) / LOG_NAME, options.log_file)
    print(text)
    return 0 if is_good else 1
