"""Measures the effects of Redis faults on requests: two gateways and two replicas share one Redis.

A window is a period of steady load. For each fault, a window with the fault is compared with an
equal window without it. The order of the two windows alternates. A difference is caused by the
fault or by noise of the machine. The first row of the table compares two windows without a fault,
and so shows the noise.
"""

import asyncio
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx

from benchmarks.common.console import log
from benchmarks.common.figures import percentile
from benchmarks.common.gateways import GatewayProgram
from benchmarks.common.models import vocab_size
from benchmarks.common.redis_servers import RedisServer, redis_cluster, redis_server
from benchmarks.common.tables import table_text
from benchmarks.directory.redis_faults import NO_FAULT, Fault, named, node_lost, single_faults
from benchmarks.directory.request_load import Asked, RequestLoad, complaints
from benchmarks.soak.replicas import Replicas
from services.cli.processes.supervisor import RestartPolicy
from services.cli.settings import UpSettings
from services.common.redis.connection import RedisConnection

NUM_REPLICAS = NUM_GATEWAYS = 2
EXACT_SECONDS = 30.0
_LOOK_SECONDS = 0.25
_EXACT = re.compile(r'^stepwell_prefix_index_state\{state="exact"\} 1\.0$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Times:
    """The lengths of a window's two parts, in seconds: `hold_seconds`, in which a lasting fault is
    in effect, and then `after_seconds`.
    """

    hold_seconds: float
    after_seconds: float


@dataclass(slots=True)
class FaultFigures:
    """The requests of windows without the fault (`calm`) and with the fault (`hit`)."""

    name: str
    calm: list[Asked] = field(default_factory=list)
    hit: list[Asked] = field(default_factory=list)
    exact_seconds: list[float] = field(default_factory=list)
    """For each window, seconds from the fault's end until every gateway's index was exact."""

    @property
    def complaints(self) -> list[str]:
        return complaints([*self.calm, *self.hit])


async def measure_requests(
    model: Path, times: Times, repetitions: int, only: str = ""
) -> list[FaultFigures]:
    """Starts Redis servers. Measures windows without a fault, and every fault whose name contains
    `only`. Raises RuntimeError if the services do not start, and TimeoutError if an index does not
    become exact.
    """
    with tempfile.TemporaryDirectory(prefix="stepwell-redis-") as directory:
        with redis_server(Path(directory) / "one") as server:
            redis = RedisConnection(server.url)
            faults = [NO_FAULT, *named(only, single_faults(server, redis))]
            found = await compare_faults(model, server.url, faults, times, repetitions)
            await redis.close()
        with redis_cluster(Path(directory) / "cluster") as nodes:
            url, faults = nodes[0].url, named(only, [node_lost(partial(_owner, nodes))])
            found += await compare_faults(model, url, faults, times, repetitions)
    return found


async def compare_faults(
    model: Path, url: str, faults: Sequence[Fault], times: Times, repetitions: int
) -> list[FaultFigures]:
    """Starts the services with the Redis at `url`, and injects the faults in rotation, each
    `repetitions` times.
    """
    if not faults:
        return []
    settings = UpSettings(model=model, num_threads=1, replicas=NUM_REPLICAS, redis_url=url)
    found = [FaultFigures(fault.name) for fault in faults]
    # Sockets are in this directory, so its path must be short.
    with tempfile.TemporaryDirectory(prefix="stepwell-") as directory:
        services = Replicas(settings, Path(directory), RestartPolicy(), num_gateways=NUM_GATEWAYS)
        async with services, httpx.AsyncClient(trust_env=False) as http:
            load = RequestLoad(services.gateways, http, vocab_size(model))
            await load.warm_up()
            windows = _Windows(load, services.gateways, http, times)
            for repetition in range(repetitions):
                for fault, figures in zip(faults, found, strict=True):
                    log(f"{repetition + 1}/{repetitions}: {fault.name}")
                    await windows.compare(fault, figures, calm_first=repetition % 2 == 0)
            await load.close()
    return found


class _Windows:
    """Runs windows (periods of steady load), with or without a fault."""

    def __init__(
        self,
        load: RequestLoad,
        gateways: Sequence[GatewayProgram],
        http: httpx.AsyncClient,
        times: Times,
    ) -> None:
        self._load = load
        self._gateways = gateways
        self._http = http
        self._times = times

    async def compare(self, fault: Fault, figures: FaultFigures, *, calm_first: bool) -> None:
        """Runs a window with the fault and an equal one without it. Adds both to `figures`."""
        calm = replace(NO_FAULT, is_held=fault.is_held)
        for happens in (calm, fault) if calm_first else (fault, calm):
            asked, seconds = await self._window(happens)
            if happens is calm:
                figures.calm += asked
            else:
                figures.hit += asked
                figures.exact_seconds.append(seconds)

    async def _window(self, fault: Fault) -> tuple[list[Asked], float]:
        """Runs a window. Returns the results of its requests, and the seconds from the fault's end
        until the index of every gateway was exact.
        """
        await self._until_exact()
        hold_seconds = self._times.hold_seconds if fault.is_held else 0.0
        happening = asyncio.create_task(self._happen(fault, hold_seconds))
        asked = await self._load.window(hold_seconds + self._times.after_seconds)
        return asked, await happening

    async def _happen(self, fault: Fault, hold_seconds: float) -> float:
        """Injects a fault. Returns the seconds from its end until every index is exact."""
        await fault.begin()
        await asyncio.sleep(hold_seconds)
        await fault.end()
        began = time.monotonic()
        await self._until_exact()
        return time.monotonic() - began

    async def _until_exact(self) -> None:
        async with asyncio.timeout(EXACT_SECONDS):
            for gateway in self._gateways:
                while _EXACT.search(await self._metrics(gateway)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_SECONDS)

    async def _metrics(self, gateway: GatewayProgram) -> str:
        return (await self._http.get(f"http://{gateway.http}/metrics")).text


def requests_table(found: Sequence[FaultFigures]) -> str:
    return table_text(
        (
            "fault",
            "requests",
            "failed",
            "ms without it, median / p99 / longest",
            "ms more with it",
            "index exact again after s",
        ),
        (_row(figures) for figures in found),
    )


def _row(figures: FaultFigures) -> tuple[str, ...]:
    calm, hit = (_millis(asked) for asked in (figures.calm, figures.hit))
    more = [with_it - without for without, with_it in zip(calm, hit, strict=True)]
    return (
        figures.name,
        str(len(figures.calm) + len(figures.hit)),
        str(len(figures.complaints)),
        " / ".join(f"{value:.0f}" for value in calm),
        " / ".join(f"{value:+.0f}" for value in more),
        f"{max(figures.exact_seconds):.2f}",
    )


def _millis(asked: Sequence[Asked]) -> tuple[float, float, float]:
    """The median, the 99th percentile and the maximum of the times, in milliseconds."""
    millis = [1000 * one.seconds for one in asked]
    return statistics.median(millis), percentile(millis, 99), max(millis)


def _owner(nodes: Sequence[RedisServer]) -> RedisServer:
    """The node of a Redis cluster that stores the log of the only model."""
    return next(node for node in nodes if node.ask("KEYS", "kvd:*:log").startswith(b"*1"))
