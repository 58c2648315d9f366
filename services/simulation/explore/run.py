"""Runs one seed: the fleet, its load, and the checks afterwards."""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.simulation.explore.clients import Answer, ask
from services.simulation.explore.fleet import Fleet
from services.simulation.explore.requests import Arrival, Edge, Request, draw_arrivals
from services.simulation.runtime.loop import VirtualLoop
from services.simulation.runtime.machine import run_on
from services.simulation.runtime.network import Network
from services.simulation.runtime.process import Process
from services.simulation.runtime.streams import MemoryStreams

_START_SECONDS = 20.0
_ANSWER_SECONDS = 120.0
_STOP_SECONDS = 30.0


class Failed(AssertionError):
    """An oracle's complaint."""


@dataclass(slots=True)
class Report:
    """What a run of a seed has shown."""

    seed: int
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Explorer:
    """Runs seeds with one model. Keeps the answers of requests alone."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._alone: dict[Request, Answer] = {}

    def run(self, seed: int) -> Report:
        """Runs one seed. `prepare` computes answers of many seeds faster."""
        self.prepare([seed])
        arrivals = _arrivals(seed)
        network = _network(seed)
        fleet = Fleet(network, self._model, 1, 1)
        report = Report(seed, network.lines)
        answers: dict[int, Answer] = {}
        try:
            run_on(network, seed, lambda: self._main(fleet, network, arrivals, answers))
        except Exception as error:
            report.failures.append(f"{type(error).__name__}: {error}")
        report.failures += network.errors
        report.failures += self._compare(arrivals, answers)
        return report

    def prepare(self, seeds: Iterable[int]) -> None:
        """Computes the answers of all requests of some seeds alone: one after the other, in a fleet
        without faults.
        """
        arrivals = (arrival for seed in seeds for arrival in _arrivals(seed))
        wanted = dict.fromkeys(_over_grpc(arrival.request) for arrival in arrivals)
        missing = [request for request in wanted if request not in self._alone]
        if not missing:
            return
        network = _network(0)
        fleet = Fleet(network, self._model, 1, 1)

        async def main() -> None:
            fleet.start_all()
            await fleet.until_ready()
            for request in missing:
                self._alone[request] = answer = Answer()
                await Process(network.loop, "client").spawn(ask("gateway-0", request, answer))
                if answer.error is not None:
                    raise Failed(f"{request} alone: {answer.error}")
            await fleet.stop_all(_STOP_SECONDS)

        run_on(network, 0, main)

    async def _main(
        self, fleet: Fleet, network: Network, arrivals: list[Arrival], answers: dict[int, Answer]
    ) -> None:
        fleet.start_all()
        async with asyncio.timeout(_START_SECONDS):
            await fleet.until_ready()
        tasks = []
        for arrival in arrivals:
            client = Process(network.loop, f"client-{arrival.number}")
            answer = answers[arrival.number] = Answer()
            tasks.append(client.spawn(_client(arrival, answer)))
        async with asyncio.timeout(_ANSWER_SECONDS):
            await asyncio.gather(*tasks)
        await asyncio.sleep(1.0)
        if held := await Process(network.loop, "operator").spawn(fleet.held()):
            raise Failed("; ".join(held))
        await fleet.stop_all(_STOP_SECONDS)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            raise Failed(f"tasks are left: {sorted(map(repr, left))}")

    def _compare(self, arrivals: list[Arrival], answers: dict[int, Answer]) -> list[str]:
        failures = []
        for arrival in arrivals:
            answer, alone = answers.get(arrival.number), self._alone[_over_grpc(arrival.request)]
            if answer is None or answer.equals(alone):
                continue
            if arrival.leaves_after_seconds is None or not answer.begins(alone):
                failures.append(
                    f"request {arrival.number} {arrival.request}: {answer} is not {alone}"
                )
        return failures


async def _client(arrival: Arrival, answer: Answer) -> None:
    await asyncio.sleep(arrival.at_seconds)
    asking = ask(f"gateway-{arrival.gateway}", arrival.request, answer)
    try:
        async with asyncio.timeout(arrival.leaves_after_seconds):
            await asking
    except TimeoutError:
        answer.error = "left"


def _arrivals(seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    return draw_arrivals(rng, rng.randrange(4, 16), 1.0, 1)


def _over_grpc(request: Request) -> Request:
    return replace(request, edge=Edge.GRPC)


def _network(seed: int) -> Network:
    network = Network(VirtualLoop(seed))
    MemoryStreams(network)
    return network
