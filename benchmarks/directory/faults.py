"""Injects faults into Redis while cached blocks change, and times the recovery of the index.

    python -m benchmarks.directory.faults [--quick]
    python -m benchmarks.directory.faults --requests [--repetitions 3] [--only TEXT]
                                              [--model DIR] [--quick]

Three KV-cache pools serve random requests and write their cached blocks to Redis. A gateway's index
is updated from Redis. A lasting fault takes ten seconds, or 1.5 seconds with --quick. Other faults
are over at once. After a fault the requests pause. The recovery time ends when the index returns
the same answer as the pools for every prompt that was ever served.

With --requests two gateways and two replicas of a model serve a steady load with Redis. Response
times during each fault are compared with response times of the same requests without the fault
(benchmarks/directory/request_faults.py). The exit status is 1 if a request failed.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import uvloop

from benchmarks.common.arguments import add_model, count, make_parser
from benchmarks.common.console import log
from benchmarks.common.redis_servers import redis_cluster, redis_server
from benchmarks.common.tables import table_text
from benchmarks.directory.redis_faults import (
    Fault,
    named,
    node_lost,
    owner_and_other,
    single_faults,
)
from benchmarks.directory.request_faults import Times, measure_requests, requests_table
from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId, RequestKey
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import block_keys
from services.common.pool.operations import Admission, Admit, Lookup, LookupResult, Release
from services.common.redis.connection import RedisConnection
from services.common.redis.directory_layout import DirectoryKeys
from services.gateway.adapters.directory.follower import sweep
from services.gateway.adapters.directory.redis_reader import RedisReader
from services.gateway.core.prefix_index.prefix_index import PrefixIndex
from services.kvpool.adapters.memory_directory import MemoryDirectory
from services.kvpool.adapters.redis_directory import RedisDirectory
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.pool_host import HostedPool, PoolHost

_BLOCK_SIZE = 16
_NUM_BLOCKS = 2000
_NUM_PROMPTS = 300
_FINGERPRINT = b"faults" + bytes(26)
_HOLD_SECONDS, _QUICK_SECONDS = 10.0, 1.5
_RIGHT_SECONDS = 30.0
_LOAD_PAUSE_SECONDS = 0.002
_AFTER_SECONDS = 4.0
_SHOWN_FAILURES = 10


@dataclass(frozen=True, slots=True)
class FaultRow:
    """The effects of one fault on the index and on the event loop."""

    name: str
    states: str
    """Names of the states that the index had during the fault."""
    right_seconds: float
    """Seconds from the fault's end until the index was equal to the pools' contents."""
    longest_pause_millis: float
    """Longest pause of the event loop in which the pools, the writer and the reader run."""


def main(argv: Sequence[str]) -> None:
    parser = make_parser("directory.faults", __doc__)
    add_model(parser)
    parser.add_argument("--quick", action="store_true", help="let each fault last only 1.5 s")
    parser.add_argument(
        "--requests", action="store_true", help="measure the effect of the faults on requests"
    )
    parser.add_argument(
        "--repetitions",
        type=count,
        default=3,
        help="number of rounds of each fault, with --requests (default: 3)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="inject only faults whose name contains this text (default: all faults)",
    )
    arguments = parser.parse_args(argv)
    hold_seconds = _QUICK_SECONDS if arguments.quick else _HOLD_SECONDS
    if arguments.requests:
        times = Times(hold_seconds, hold_seconds if arguments.quick else _AFTER_SECONDS)
        found = uvloop.run(
            measure_requests(arguments.model, times, arguments.repetitions, arguments.only)
        )
        print(requests_table(found))
        failures = [text for figures in found for text in figures.complaints]
        print("\n".join(failures[:_SHOWN_FAILURES]), file=sys.stderr)
        sys.exit(1 if failures else 0)
    rows = uvloop.run(measure(hold_seconds, arguments.only))
    print(
        table_text(
            ("fault", "states of the index", "right again after s", "longest pause ms"),
            (
                (
                    row.name,
                    row.states,
                    f"{row.right_seconds:.2f}",
                    f"{row.longest_pause_millis:.0f}",
                )
                for row in rows
            ),
        )
    )


async def measure(hold_seconds: float, only: str) -> list[FaultRow]:
    """Starts Redis servers, and injects every fault whose name contains `only`."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="stepwell-faults-") as directory:
        with redis_server(Path(directory) / "one") as server:
            async with running(server.url) as load:
                for fault in named(only, single_faults(server, load.redis)):
                    rows.append(await load.measure(fault, hold_seconds))
        with redis_cluster(Path(directory) / "cluster") as nodes:
            owner, seed = owner_and_other(nodes, DirectoryKeys.of(_FINGERPRINT).log)
            async with running(seed.url) as load:
                for fault in named(only, [node_lost(lambda: owner)]):
                    rows.append(await load.measure(fault, hold_seconds))
    return rows


class Load:
    """Pools that serve random requests, and a gateway's index of the pools' cached blocks."""

    def __init__(self, url: str) -> None:
        self.redis = RedisConnection(url)
        self._writer = RedisDirectory(RedisConnection(url))
        self._own = MemoryDirectory()
        self._index = PrefixIndex()
        self._reader = RedisReader(
            self._index, RedisConnection(url), RedisConnection(url, blocking=True)
        )
        self._rng = random.Random(3)
        self._prompts = [_prompt(self._rng) for _ in range(_NUM_PROMPTS)]
        host: PoolHost[None] = PoolHost(
            (self._own, self._writer),
            lambda: time.time_ns() // 1000,
            max_pools=3,
            max_blocks_per_pool=_NUM_BLOCKS,
        )
        self._host = host
        groups = (KVCacheGroup(AttentionType.FULL, _BLOCK_SIZE),)
        self._pools = [
            host.open(
                PoolId(name), PoolConfig(_NUM_BLOCKS, groups, fingerprint=_FINGERPRINT, node=name)
            )
            for name in ("a", "b", "c")
        ]
        self._next_request = 0
        self._longest_pause = 0.0
        self._states: dict[str, None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def measure(self, fault: Fault, hold_seconds: float) -> FaultRow:
        """Injects a fault under load and measures its effects."""
        log(fault.name)
        await self._until_right()
        self._longest_pause, self._states = 0.0, {}
        serving = asyncio.create_task(self._serve())
        await asyncio.sleep(0.5)
        self._states = {}
        await fault.begin()
        await asyncio.sleep(hold_seconds if fault.is_held else 0)
        await fault.end()
        serving.cancel()
        seconds = await self._until_right()
        return FaultRow(fault.name, ", ".join(self._states), seconds, 1000 * self._longest_pause)

    def start(self) -> None:
        """Starts the tasks that read from Redis, sweep the index, and watch the event loop."""
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self._reader.run(lambda: _FINGERPRINT),
                sweep(self._index),
                self._watch(),
            )
        ]

    async def close(self) -> None:
        await self._writer.close()
        await self.redis.close()
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _serve(self) -> None:
        while True:
            self._request(self._rng.choice(self._pools), self._rng.choice(self._prompts))
            await asyncio.sleep(_LOAD_PAUSE_SECONDS)

    def _request(self, hosted: HostedPool[None], prompt: list[BlockHash]) -> None:
        """Serves one request. Its blocks are cached, and other blocks are evicted for them."""
        self._next_request += 1
        request, tokens = RequestKey(self._next_request), len(prompt) * _BLOCK_SIZE
        found = hosted.pool.transact([Lookup([request], [tokens - 1], [prompt])]).results[0]
        assert isinstance(found, LookupResult)
        admission = Admission(
            request=request,
            max_hit_tokens=tokens - 1,
            num_hit_tokens=found.num_hit_tokens[0],
            num_slots=tokens,
            num_commit_tokens=tokens,
            num_reserve_slots=tokens,
            num_watermark_blocks=0,
            new_hashes=[],
            resumed=False,
        )
        hosted.pool.transact([Admit([admission]), Release([request])])
        self._host.publish_events(hosted)

    async def _until_right(self) -> float:
        """Waits until the index returns the same answers as the pools. Returns the seconds of
        waiting. Raises TimeoutError after _RIGHT_SECONDS.
        """
        began = time.perf_counter()
        while not await self._is_right():
            if time.perf_counter() > began + _RIGHT_SECONDS:
                raise TimeoutError(f"the index was not right within {_RIGHT_SECONDS:g} s")
            await asyncio.sleep(0.01)
        return time.perf_counter() - began

    async def _is_right(self) -> bool:
        for prompt in self._prompts:
            await asyncio.sleep(0)
            own = {match.pool_id: match.num_blocks for match in await self._own.match(prompt)}
            if self._index.match(block_keys(prompt)) != own:
                return False
        return all(self._index.view(hosted.pool_id) for hosted in self._pools)

    async def _watch(self) -> None:
        """Records the states of the index, and the longest pause of the event loop."""
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            self._longest_pause = max(self._longest_pause, time.perf_counter() - began - 0.005)
            self._states[self._index.state.value] = None


@asynccontextmanager
async def running(url: str) -> AsyncIterator[Load]:
    """Runs pools and a gateway's index with the Redis at `url`."""
    load = Load(url)
    load.start()
    try:
        yield load
    finally:
        await load.close()


def _prompt(rng: random.Random) -> list[BlockHash]:
    """The block hashes of a prompt with one of ten common prefixes and a random tail."""
    path = f"system {rng.randrange(10)}"
    begin = [f"{path} {number}" for number in range(20)]
    tail = [f"{path} {rng.random()} {number}" for number in range(rng.randrange(1, 60))]
    return [BlockHash(sha256(text.encode()).digest()) for text in begin + tail]


if __name__ == "__main__":
    main(sys.argv[1:])
