"""The sides of a comparison: ways to run the same load, run in turns."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.common.clients import GrpcClient, HttpClient
from benchmarks.common.figures import Figures, figures_of, interleaved, median_figures, median_ratio
from benchmarks.common.load import Load, RequestTimes, run_load
from benchmarks.serving.in_process_child import InProcessChild

WARM_UP_TOKENS = 4
RUN_SECONDS = 300.0
"""A run that takes longer hangs."""
MIN_ROUNDS = 2
CLIENT = "client"
_CPUCLOCK_SCHED = 2
"""Linux's clock ids of processes: the inverted process id, and which clock in the lowest bits."""


class Side(Protocol):
    """One way to run a load."""

    def pids(self) -> dict[str, int]:
        """The processes that take part, by name."""
        ...

    async def run(self, load: Load) -> list[RequestTimes]:
        """Runs a load to its end."""
        ...


class InProcessSide:
    """Everything in one process, the clients too."""

    def __init__(self, child: InProcessChild) -> None:
        self._child = child

    def pids(self) -> dict[str, int]:
        return {"one process": self._child.pid}

    async def run(self, load: Load) -> list[RequestTimes]:
        return await self._child.run(load)


class Services(Protocol):
    """Running services: their addresses and processes."""

    @property
    def http(self) -> str:
        """host:port of the HTTP API."""
        ...

    @property
    def grpc(self) -> str:
        """host:port of the gRPC API."""
        ...

    def pids(self) -> dict[str, int]:
        """The process of each service."""
        ...


class GrpcSide:
    """The services, through the gateway's gRPC API."""

    def __init__(self, stack: Services) -> None:
        self._stack = stack

    def pids(self) -> dict[str, int]:
        return {**self._stack.pids(), CLIENT: os.getpid()}

    async def run(self, load: Load) -> list[RequestTimes]:
        client = GrpcClient(self._stack.grpc)
        try:
            return await run_load(client, load)
        finally:
            await client.close()


class HttpSide(GrpcSide):
    """The services, through the gateway's HTTP API, as server-sent events."""

    async def run(self, load: Load) -> list[RequestTimes]:
        client = HttpClient(self._stack.http)
        try:
            await client.open(load.concurrency)
            return await run_load(client, load)
        finally:
            await client.close()


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a comparison is run. Rounds stop early once a level has taken `level_seconds`."""

    concurrencies: tuple[int, ...]
    num_rounds: int
    requests_each: int
    """Requests of a lone client, one after the other; with more clients each sends fewer."""
    prompt_tokens: int
    output_tokens: int
    level_seconds: float = 60.0

    def load(self, concurrency: int, vocab_size: int, seed: str) -> Load:
        """The load of one run."""
        return Load(
            concurrency=concurrency,
            requests_each=max(self.requests_each // concurrency, 1),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            vocab_size=vocab_size,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """A side at one concurrency. `ratio`: its throughput to the first side's."""

    concurrency: int
    side: str
    num_rounds: int
    figures: Figures
    ratio: float
    processor_micros: dict[str, float]
    """Processor time per output token, by process."""


async def compare(
    sides: Mapping[str, Side],
    schedule: Schedule,
    vocab_size: int,
    tell: Callable[[str], None],
) -> list[Row]:
    """Runs every load on every side, in turns, after one short run each that does not count."""
    rows: list[Row] = []
    for concurrency in schedule.concurrencies:
        rounds: dict[str, list[Figures]] = defaultdict(list)
        spent: dict[str, dict[str, float]] = {name: defaultdict(float) for name in sides}
        for name, side in sides.items():
            await side.run(_warm_up(schedule, concurrency, vocab_size, name))
        begun = time.monotonic()
        for number, order in enumerate(interleaved(list(sides), schedule.num_rounds)):
            if number >= MIN_ROUNDS and time.monotonic() - begun > schedule.level_seconds:
                break
            for name in order:
                load = schedule.load(concurrency, vocab_size, f"{name}/{concurrency}/{number}")
                figures = await _run(sides[name], load, spent[name])
                rounds[name].append(figures)
                tell(f"{concurrency:>4} at once, {name}: {figures.tokens_per_second:.0f} tokens/s")
        rows += _rows(concurrency, rounds, spent, schedule)
    return rows


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used so far, ended threads included."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


async def _run(side: Side, load: Load, spent: dict[str, float]) -> Figures:
    pids = side.pids()
    before = {name: processor_seconds(pid) for name, pid in pids.items()}
    async with asyncio.timeout(RUN_SECONDS):
        figures = figures_of(await side.run(load))
    for name, pid in pids.items():
        spent[name] += processor_seconds(pid) - before[name]
    return figures


def _warm_up(schedule: Schedule, concurrency: int, vocab_size: int, name: str) -> Load:
    load = schedule.load(concurrency, vocab_size, f"{name}/{concurrency}/warm-up")
    return replace(load, requests_each=1, output_tokens=WARM_UP_TOKENS)


def _rows(
    concurrency: int,
    rounds: Mapping[str, Sequence[Figures]],
    spent: Mapping[str, Mapping[str, float]],
    schedule: Schedule,
) -> list[Row]:
    first = next(iter(spent))
    rows = []
    for side in spent:
        load = schedule.load(concurrency, 1, "")
        tokens = load.output_tokens * load.requests_each * concurrency * len(rounds[side])
        rows.append(
            Row(
                concurrency,
                side,
                len(rounds[side]),
                median_figures(rounds[side]),
                median_ratio(rounds[side], rounds[first]),
                {name: seconds * 1e6 / tokens for name, seconds in spent[side].items()},
            )
        )
    return rows
