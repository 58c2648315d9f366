"""The faults of a run, drawn from its seed."""

import asyncio
import random
from dataclasses import dataclass
from enum import Enum

from services.simulation.explore.fleet import Fleet
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process

_SLOW_STOP_SECONDS, _SLOW_RUN_SECONDS = 0.05, 0.005


class Kind(Enum):
    CRASH = "crashes"
    TERMINATE = "ends after SIGTERM"
    STOP = "is stopped"
    SLOW = "runs a tenth of the time"
    CUT = "is cut off"
    CUT_ONE_WAY = "sends into the void"
    RESET = "loses its connections"
    AHEAD = "has a clock that is ahead"
    DISK = "has a full disk"
    DEVICE = "has a faulty device"


_DEVICE_FAULTS = ("refuse memory", "fail", "exit", "hang 0.5 s", "hang 3 s", "slow 30x for 1 s")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a service, from a time on and for some seconds. With `peer`, it is a fault of the
    network between both. `rule` says when and how a worker's device fails.
    """

    at_seconds: float
    kind: Kind
    service: str
    seconds: float
    peer: str | None = None
    rule: str = ""

    def __str__(self) -> str:
        if self.rule:
            return f"{self.service} {self.kind.value}: {self.rule}"
        peer = "" if self.peer is None else f" ({self.peer})"
        what = f"{self.service} {self.kind.value}{peer} for {self.seconds:.2f} s"
        return f"at {self.at_seconds:.3f} s {what}"


def draw_faults(rng: random.Random, services: list[str], count: int, seconds: float) -> list[Fault]:
    faults = []
    for _ in range(count):
        kind, service = rng.choice(list(Kind)), rng.choice(services)
        if kind is Kind.DEVICE:
            faults.append(_draw_device_fault(rng, services, seconds))
            continue
        peer = None
        if kind in (Kind.CUT, Kind.CUT_ONE_WAY, Kind.RESET):
            peer = rng.choice([name for name in services if name != service])
        lasts = rng.choice((0.02, 0.3, 3.0, 40.0)) * rng.random()
        faults.append(Fault(rng.random() * seconds, kind, service, lasts, peer))
    return sorted(faults, key=lambda fault: fault.at_seconds)


def _draw_device_fault(rng: random.Random, services: list[str], seconds: float) -> Fault:
    worker = rng.choice([name for name in services if name.startswith("worker")])
    at = rng.random() * seconds
    when = rng.choice((f"after {at:.3f} s", f"at step {rng.randrange(1, 60)}"))
    return Fault(0.0, Kind.DEVICE, worker, 0.0, rule=f"{when}: {rng.choice(_DEVICE_FAULTS)}")


async def inject(fault: Fault, fleet: Fleet, network: Network) -> None:
    """Waits for the time of a fault, causes it, and ends it. Leaves a dead service alone."""
    await asyncio.sleep(fault.at_seconds)
    process = fleet.services[fault.service].process
    network.log(f"fault: {fault}")
    match fault.kind:
        case Kind.CRASH:
            await fleet.crash(fault.service, fault.seconds)
        case Kind.TERMINATE:
            await fleet.restart(fault.service)
        case Kind.STOP:
            await _stop(process, network, fault.seconds)
        case Kind.SLOW:
            until = network.loop.time() + fault.seconds
            while network.loop.time() < until:
                await _stop(process, network, _SLOW_STOP_SECONDS)
                await asyncio.sleep(_SLOW_RUN_SECONDS)
        case Kind.AHEAD:
            process.seconds_ahead = fault.seconds
            await asyncio.sleep(fault.seconds)
            process.seconds_ahead = 0.0
        case Kind.DISK:
            process.is_disk_full = True
            await asyncio.sleep(fault.seconds)
            process.is_disk_full = False
        case Kind.DEVICE:
            """The worker's settings have the rule."""
        case _:
            assert fault.peer is not None
            await _disturb(fault, process, fleet.services[fault.peer].process, network)


async def _stop(process: Process, network: Network, seconds: float) -> None:
    process.stop()
    network.stopped(process)
    await asyncio.sleep(seconds)
    network.loop.resume(process)


async def _disturb(fault: Fault, one: Process, other: Process, network: Network) -> None:
    if fault.kind is Kind.RESET:
        network.reset(one, other)
        return
    pairs = [(one, other), (other, one)] if fault.kind is Kind.CUT else [(one, other)]
    for source, target in pairs:
        network.cut(source, target)
    await asyncio.sleep(fault.seconds)
    for source, target in pairs:
        network.mend(source, target)
