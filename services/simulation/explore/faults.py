"""Draws the faults of a run from its seed, and causes them."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from services.simulation.explore.fleet import TERMINATION_SECONDS, Fleet
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process, State

_SLOW_STOP_SECONDS, _SLOW_RUN_SECONDS = 0.1, 0.01
PAUSE_SECONDS = 0.02
"""Limit of the pauses of a busy service."""
_BUSY_RUN_SECONDS, _BUSY_SECONDS = 0.01, 2.0
_SECONDS = 0.02, 0.3, 3.0, 40.0
"""Limits of the durations of faults, one of which is drawn for each fault."""
_RESET_SECONDS, _LONGEST_RESET_SECONDS = 0.1, 1.0
_FOCUS = 0.4
"""The probability that most faults of a run are of one kind."""
_SOON_SECONDS = 0.15
_ANSWER_SECONDS = 0.0003
"""The approximate time that the reply to a message travels."""
_DRAIN_SECONDS = 4.5
"""Seconds within which a scheduler ends after SIGTERM if nothing else fails. Its requests end
earlier. With requests that do not end, it ends later.
"""
_AHEAD = 200
"""A wrong clock is ahead by this many times the duration of the fault."""


class Kind(Enum):
    CRASH = "crashes"
    TERMINATE = "ends after SIGTERM"
    STOP = "is stopped"
    SLOW = "runs a tenth of the time"
    CUT = "is cut off"
    CUT_ONE_WAY = "sends into the void"
    RESET = "loses its connections again and again"
    AHEAD = "has a clock that is ahead"
    DISK = "has a full disk"
    DEVICE = "has a faulty device"


_HANG, _HANG_SECONDS = "hang 20 s", 20.0
_DEVICE_FAULTS = "refuse memory", "fail", "fail", "exit", "hang 0.5 s", _HANG, "slow 30x for 1 s"
_END_GATEWAYS = Kind.CRASH, Kind.TERMINATE, Kind.STOP


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a service, or of its network to `peer`. It begins at `at_seconds` and lasts
    `seconds`. `rule` describes when and how a worker's device fails.
    """

    at_seconds: float
    kind: Kind
    service: str
    seconds: float
    peer: str | None = None
    rule: str = ""

    def ends_calls_of(self, gateway: str) -> bool:
        """Whether clients of `gateway` may receive errors."""
        return self.service == gateway and self.kind in _END_GATEWAYS

    @property
    def hang_seconds(self) -> float:
        """Limit on the time for which a device still hangs in steps that schedulers gave up."""
        return _HANG_SECONDS * self.rule.count(_HANG)

    def __str__(self) -> str:
        if self.rule:
            return f"{self.service} {self.kind.value}: {self.rule}"
        peer = "" if self.peer is None else f" ({self.peer})"
        what = f"{self.service} {self.kind.value}{peer} for {self.seconds:.2f} s"
        return f"at {self.at_seconds:.3f} s {what}"


def draw_faults(
    rng: random.Random,
    services: list[str],
    pairs: list[tuple[str, str]],
    count: int,
    seconds: float,
    moments: list[float],
    theme: Sequence[Kind] = (),
    durations: Sequence[float] = (),
) -> list[Fault]:
    """Draws faults of services, and of the network between `pairs` of services. Many begin soon
    after one of `moments`, when services are busy. If there is a `theme`, most faults are of its
    kinds. Otherwise, in some runs most faults are of one kind. Pools have more wrong clocks and
    lost connections than others, because their clocks number generations and their transactions are
    sent again. `durations` replaces the usual limits of the durations of faults.
    """
    faults, kinds = [], [*Kind, Kind.DEVICE]
    pools = [name for name in services if name.startswith("pool")] or services
    if not any(name.startswith("worker") for name in services):
        kinds = [kind for kind in Kind if kind is not Kind.DEVICE]
    if theme:
        kinds += [*theme] * (3 * len(kinds) // len(theme))
    elif rng.random() < _FOCUS:
        kinds += [rng.choice(kinds)] * 2 * len(kinds)
    for _ in range(count):
        kind, service = rng.choice(kinds), rng.choice(services)
        if kind is Kind.DEVICE:
            counts = (3, 5, 8) if kind in theme else (1, 2, 3)
            faults.append(_draw_device_fault(rng, services, seconds, counts))
            continue
        if kind in (Kind.AHEAD, Kind.RESET) and rng.random() < 0.4:
            service = rng.choice(pools)
        peer = None
        if kind in (Kind.CUT, Kind.CUT_ONE_WAY):
            service, peer = rng.sample(rng.choice(pairs), 2)
        at = rng.random() * seconds
        if rng.random() < 0.7:
            at = rng.choice(moments) + _SOON_SECONDS * rng.random() ** 2
        lasts = rng.choice(durations or _SECONDS) * (0.2 + 0.8 * rng.random())
        if kind is Kind.AHEAD:
            lasts = max(lasts, 1.0)
        faults.append(Fault(at, kind, service, lasts, peer))
        if kind is Kind.AHEAD or (kind is Kind.CRASH and rng.random() < 0.4):
            faults += _draw_faults_after(rng, faults[-1], services)
    return sorted(faults, key=lambda fault: fault.at_seconds)


def _draw_faults_after(rng: random.Random, fault: Fault, services: list[str]) -> Iterator[Fault]:
    """Yields one or two crashes, during and after a wrong clock. While a service restarts, yields a
    crash, or the loss of the service's connections.
    """
    begins = [fault.at_seconds + fault.seconds + rng.choice((0.01, 0.3)) * rng.random()]
    if fault.kind is Kind.AHEAD:
        begins.append(fault.at_seconds + fault.seconds * rng.random())
    for at in begins:
        service = rng.choice((fault.service, rng.choice(services)))
        if fault.kind is Kind.CRASH and rng.random() < 0.5:
            yield Fault(at, Kind.RESET, service, _LONGEST_RESET_SECONDS)
        else:
            yield Fault(at, Kind.CRASH, service, 0.1)


def _draw_device_fault(
    rng: random.Random, services: list[str], seconds: float, counts: tuple[int, ...]
) -> Fault:
    """Draws one or several successive faults of a device, often of the same kind. `counts` are the
    possible numbers of further faults.
    """
    worker = rng.choice([name for name in services if name.startswith("worker")])
    step, what = rng.randrange(1, 60), rng.choice(_DEVICE_FAULTS)
    rules = {f"at step {step}": what}
    if rng.random() < 0.3:
        rules = {f"after {rng.random() * seconds:.3f} s": what}
    elif rng.random() < 0.6:
        for _ in range(rng.choice(counts)):
            step += rng.choice((1, 1, 2, 3, 10))
            rules[f"at step {step}"] = rng.choice((what, rng.choice(_DEVICE_FAULTS)))
    script = "; ".join(f"{when}: {what}" for when, what in rules.items())
    return Fault(0.0, Kind.DEVICE, worker, 0.0, rule=script)


async def inject(fault: Fault, fleet: Fleet, network: Network, *, must_end: bool) -> None:
    """Waits until a fault is due, causes it, and ends it. Does nothing to a dead service. If
    `must_end`, raises AssertionError if the service does not end in time after SIGTERM.
    """
    await asyncio.sleep(fault.at_seconds)
    process = fleet.services[fault.service].process
    network.log(f"fault: {fault}")
    match fault.kind:
        case Kind.CRASH:
            await fleet.crash(fault.service, fault.seconds)
        case Kind.TERMINATE:
            drains = must_end and fault.service.startswith("scheduler")
            seconds = _DRAIN_SECONDS if drains else TERMINATION_SECONDS
            ends_itself = await fleet.restart(fault.service, seconds)
            if must_end and not ends_itself:
                raise AssertionError(f"{fault.service} has not ended after SIGTERM")
        case Kind.STOP:
            await _stop(process, network, fault.seconds)
        case Kind.SLOW:
            until = network.loop.time() + fault.seconds
            chance = network.loop.rng_of("slow", fault.service)
            while network.loop.time() < until:
                await _stop(process, network, _SLOW_STOP_SECONDS * chance.random() ** 2)
                await asyncio.sleep(_SLOW_RUN_SECONDS * chance.random())
        case Kind.AHEAD:
            process.seconds_ahead = _AHEAD * fault.seconds
            await asyncio.sleep(fault.seconds)
            fleet.services[fault.service].process.seconds_ahead = 0.0
        case Kind.DISK:
            process.is_disk_full = True
            await asyncio.sleep(fault.seconds)
            process.is_disk_full = False
        case Kind.DEVICE:
            """The worker's settings contain the rule of the fault."""
        case Kind.RESET:
            await _reset(fault, fleet, network)
        case _:
            assert fault.peer is not None
            await _cut(fault, process, fleet.services[fault.peer].process, network)


async def keep_busy(name: str, fleet: Fleet, network: Network, pause_seconds: float) -> None:
    """Repeatedly interrupts a service for up to `pause_seconds`, as on a busy machine. The service
    then handles several messages at once.
    """
    chance, until = network.loop.rng_of("busy", name), network.loop.time() + _BUSY_SECONDS
    while network.loop.time() < until:
        await asyncio.sleep(_BUSY_RUN_SECONDS * chance.random())
        process = fleet.services[name].process
        if process.state is State.RUNS:
            process.stop()
            await asyncio.sleep(pause_seconds * chance.random())
            network.loop.resume(process)


async def _stop(process: Process, network: Network, seconds: float) -> None:
    process.stop()
    network.stopped(process)
    await asyncio.sleep(seconds)
    network.loop.resume(process)


async def _cut(fault: Fault, one: Process, other: Process, network: Network) -> None:
    pairs = [(one, other), (other, one)] if fault.kind is Kind.CUT else [(one, other)]
    for source, target in pairs:
        network.cut(source, target)
    await asyncio.sleep(fault.seconds)
    for source, target in pairs:
        network.mend(source, target)


async def _reset(fault: Fault, fleet: Fleet, network: Network) -> None:
    """Repeatedly ends connections between services, often while a reply is on its way."""
    chance, now = network.loop.rng_of("reset", fault.service), network.loop.time
    links = [link for link in fleet.links if fault.service in link]
    until = now() + min(fault.seconds, _LONGEST_RESET_SECONDS)
    while now() < until:
        pairs = [tuple(fleet.services[name].process for name in link) for link in links]
        connected = [pair for pair in pairs if network.are_connected(*pair)]
        one, other = chance.choice(connected or pairs)
        if chance.random() < 0.7:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(until, now() + _RESET_SECONDS)):
                    for _ in range(chance.choice((1, 1, 2, 3, 5, 8))):
                        await network.arrival(one, other)
            await asyncio.sleep(_ANSWER_SECONDS * chance.random())
        network.reset(one, other)
        await asyncio.sleep(_RESET_SECONDS * chance.random())
