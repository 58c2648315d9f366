"""Runs one seed: the fleet, its load, and the checks afterwards."""

import asyncio
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.simulation.explore.clients import Answer, ask
from services.simulation.explore.faults import Fault, Kind, draw_faults, inject
from services.simulation.explore.fleet import Fleet
from services.simulation.explore.left import left_on_disks, what_is_left
from services.simulation.explore.lines import unexpected_line
from services.simulation.explore.members import REDIS, Shape, service_names
from services.simulation.explore.requests import Arrival, Request, draw_arrivals
from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.machine import run_on
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process, State
from services.simulation.runtime.streams import MemoryStreams

_START_SECONDS = 20.0
_LOAD_SECONDS = 1.0
_SETTLE_SECONDS = 3.0
_CALM_SETTLE_SECONDS = 0.3
"""Enough for what is under way without faults. An answer that nobody wants may take longer."""
_ANSWER_SECONDS = 120.0
_TAKEOVER_SECONDS = 15.0
"""Enough to notice that a replica hangs, and to answer at another one."""
_STOP_SECONDS = 30.0


class Failed(AssertionError):
    """An oracle's complaint."""


@dataclass(slots=True)
class Report:
    """The result of a run."""

    plan: "Plan"
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a run that is not drawn while it runs."""

    seed: int
    shape: Shape
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...] = ()

    def excuses(self, arrival: Arrival) -> bool:
        """Whether a client may get an error: its gateway was disturbed itself."""
        gateway = f"gateway-{arrival.gateway}"
        return any(gateway == fault.service for fault in self.faults)

    @property
    def spares_a_replica(self) -> bool:
        """Whether the faults leave all of a replica alone, and what it shares with others."""
        hit = {name for fault in self.faults for name in (fault.service, fault.peer or "")} - {""}
        replicas = {name.split("-")[1] for name in hit if "-" in name}
        shared = any(name.startswith((REDIS, "gateway")) for name in hit)
        return len(replicas) < self.shape.num_replicas and not shared


def make_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    shape = _draw_shape(rng)
    count, num_gateways = rng.randrange(4, 16), shape.num_gateways
    arrivals = draw_arrivals(rng, count, _LOAD_SECONDS, num_gateways, pools=shape.pools)
    services = service_names(shape)
    if shape.num_replicas > 1 and rng.random() < 0.5:  # the other replica takes over
        services = [name for name in services if re.match(r"(pool|worker|scheduler)-0", name)]
    faults = draw_faults(rng, services, rng.choice((0, 1, 1, 2, 4)), _LOAD_SECONDS)
    return Plan(seed, shape, tuple(arrivals), tuple(faults))


def _draw_shape(rng: random.Random) -> Shape:
    shape = Shape(
        num_replicas=rng.choice((1, 1, 2)),
        num_gateways=rng.choice((1, 1, 2)),
        num_ranks=2 if rng.random() < 0.15 else 1,
        has_redis=rng.random() < 0.3,
        has_step_log=rng.random() < 0.3,
    )
    if rng.random() < 0.06:
        return replace(shape, pools=True)
    drafts = rng.choice(("", "", "ngram", "draft_model"))
    return replace(shape, drafts=drafts, has_tier=rng.random() < 0.3)


class Explorer:
    """Runs plans with one model. Keeps the answers of requests alone."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._alone: dict[Request, Answer] = {}

    def run(self, plan: Plan) -> Report:
        """Runs one plan. `prepare` computes answers of many plans faster."""
        self.prepare([plan])
        network = _network(plan.seed)
        device = [(fault.service, fault.rule) for fault in plan.faults if fault.kind is Kind.DEVICE]
        fleet = Fleet(network, self._model, plan.shape, device)
        report = Report(plan, network.lines)
        answers: dict[int, Answer] = {}
        try:
            run_on(network, plan.seed, lambda: _main(plan, fleet, network, answers))
        except Exception as error:
            report.failures.append(f"{type(error).__name__}: {error}")
        report.failures += network.errors
        report.failures += self._compare(plan, answers)
        return report

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Computes the answers of all requests of some plans alone: one after the other, in fleets
        without faults.
        """
        arrivals = (arrival for plan in plans for arrival in plan.arrivals)
        wanted = dict.fromkeys(arrival.request.usual() for arrival in arrivals)
        missing = [request for request in wanted if request not in self._alone]
        for pools in (False, True):
            of_fleet = [one for one in missing if one.wants_vector is pools]
            if of_fleet:
                self._answer_alone(of_fleet, Shape(pools=pools))

    def _answer_alone(self, missing: Iterable[Request], shape: Shape) -> None:
        network = _network(0)
        fleet = Fleet(network, self._model, shape)

        async def main() -> None:
            fleet.start_all()
            async with asyncio.timeout(_START_SECONDS):
                await fleet.until_ready()
            for request in missing:
                self._alone[request] = answer = Answer()
                client = Process(network.loop, "client")
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await client.spawn(ask("gateway-0", request, answer))
                if answer.error is not None:
                    raise Failed(f"{request} alone: {answer.error}")
            await fleet.stop_all(_STOP_SECONDS)

        run_on(network, 0, main)

    def _compare(self, plan: Plan, answers: dict[int, Answer]) -> list[str]:
        failures = []
        for arrival in plan.arrivals:
            answer, alone = answers.get(arrival.number), self._alone[arrival.request.usual()]
            if answer and arrival.request.salt and answer.num_cached_tokens and not plan.faults:
                failures.append(f"request {arrival.number} has cached tokens of another salt")
            if answer and answer.seconds > _TAKEOVER_SECONDS and plan.spares_a_replica:
                failures.append(f"request {arrival.number} was not answered by another replica")
            if answer is None or answer.equals(alone):
                continue
            may_end = arrival.leaves_after_seconds is not None or plan.excuses(arrival)
            if not may_end or not answer.begins(alone):
                what = f"request {arrival.number} {arrival.request}"
                failures.append(f"{what}: {answer} is not {alone}")
        return failures


async def _main(plan: Plan, fleet: Fleet, network: Network, answers: dict[int, Answer]) -> None:
    fleet.start_all()
    async with asyncio.timeout(_START_SECONDS):
        await fleet.until_ready()
    num_lines = len(network.lines)
    injecting = [asyncio.create_task(inject(fault, fleet, network)) for fault in plan.faults]
    clients = []
    for arrival in plan.arrivals:
        process = Process(network.loop, f"client-{arrival.number}")
        answer = answers[arrival.number] = Answer()
        clients.append(process.spawn(_client(arrival, answer, network)))
    await asyncio.gather(*injecting)
    async with asyncio.timeout(_ANSWER_SECONDS):
        await asyncio.gather(*clients)
    async with asyncio.timeout(_START_SECONDS):
        await fleet.until_ready()
    await asyncio.sleep(_SETTLE_SECONDS if plan.faults else _CALM_SETTLE_SECONDS)
    if line := unexpected_line(network.lines[num_lines:], is_calm=not plan.faults):
        raise Failed(f"a line of the log is unexpected: {line}")
    if left := what_is_left(fleet, plan.shape.num_gateways):
        raise Failed("; ".join(left))
    await fleet.stop_all(_STOP_SECONDS)
    if wrong := left_on_disks(fleet):
        raise Failed("; ".join(wrong))
    await asyncio.sleep(_SETTLE_SECONDS)
    if tasks := [task for task in asyncio.all_tasks() if _runs(task)]:
        raise Failed(f"tasks are left: {sorted(map(repr, tasks))}")
    if network.listeners or network.connections:
        what = f"{list(network.listeners)} and {len(network.connections)} connections"
        raise Failed(f"addresses are left: {what}")


def _runs(task: "asyncio.Task[object]") -> bool:
    """Whether a task is left in a process that was not killed."""
    process = getattr(task, "process", None)
    is_dead = isinstance(process, Process) and process.state is State.DEAD
    return task is not asyncio.current_task() and not is_dead


async def _client(arrival: Arrival, answer: Answer, network: Network) -> None:
    await asyncio.sleep(arrival.at_seconds)
    begin = network.loop.time()
    asking = ask(f"gateway-{arrival.gateway}", arrival.request, answer)
    try:
        async with asyncio.timeout(arrival.leaves_after_seconds):
            await asking
    except TimeoutError:
        answer.error = "left"
    pauses = arrival.request.pause_seconds * (1 + len(arrival.request.later_prompts))
    answer.seconds = network.loop.time() - begin - pauses


def _network(seed: int) -> Network:
    network = Network(VirtualLoop(seed))
    MemoryStreams(network)
    return network
