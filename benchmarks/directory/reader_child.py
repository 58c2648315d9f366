"""A gateway's reader in a separate process: loads the index, then looks up prompts.

    python -m benchmarks.directory.reader_child URL BLOCKS

The process writes its figures to standard output, in JSON.
"""

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

import uvloop

from benchmarks.common.figures import percentile
from benchmarks.directory.chains import make_chains
from benchmarks.directory.log_layout import FINGERPRINT
from services.common.pool.block_hash import BlockHash
from services.common.pool.kv_directory import block_keys
from services.common.redis.connection import RedisConnection
from services.gateway.adapters.directory.redis_reader import RedisReader
from services.gateway.core.prefix_index.node_view import DirectoryState
from services.gateway.core.prefix_index.prefix_index import PrefixIndex

_PASSES = 3
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """The costs of a gateway's index: the time to load all blocks, memory, and look-up times."""

    num_keys: int
    cold_start_seconds: float
    longest_pause_millis: float
    memory_megabytes: float
    lookup_median_millis: float
    lookup_p99_millis: float
    lookup_from_hashes_median_millis: float


async def measure(url: str, num_blocks: int) -> IndexFigures:
    """Loads all blocks into an index, looks up every chain of blocks, and checks the answers."""
    index = PrefixIndex()
    reader = RedisReader(index, RedisConnection(url), RedisConnection(url, blocking=True))
    gc.collect()
    before = _resident_bytes()
    began = time.perf_counter()
    running = asyncio.create_task(reader.run(lambda: FINGERPRINT))
    pauses = []
    expected = _num_keys(num_blocks)
    while not (index.state is DirectoryState.EXACT and index.num_keys == expected):
        paused = time.perf_counter()
        if paused > began + _START_SECONDS:
            raise TimeoutError(f"{index.num_keys} of {expected} blocks are in the index")
        await asyncio.sleep(0.001)
        pauses.append(time.perf_counter() - paused)
    seconds = time.perf_counter() - began
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    gc.collect()
    memory = _resident_bytes() - before
    index.contact = DirectoryState.EXACT
    times, from_hashes = _look_up(index, num_blocks)
    return IndexFigures(
        num_keys=index.num_keys,
        cold_start_seconds=seconds,
        longest_pause_millis=1000 * max(pauses),
        memory_megabytes=memory / 1e6,
        lookup_median_millis=1000 * statistics.median(times),
        lookup_p99_millis=1000 * percentile(times, 99),
        lookup_from_hashes_median_millis=1000 * statistics.median(from_hashes),
    )


def _look_up(index: PrefixIndex, num_blocks: int) -> tuple[list[float], list[float]]:
    """The durations of look-ups in seconds. In the first list the block keys are given. In the
    second list they are computed from block hashes within the measured time.
    """
    times, from_hashes = [], []
    for _ in range(_PASSES):
        for chain in make_chains(num_blocks):
            keys = list(chain.keys)
            began = time.perf_counter()
            found = index.match(keys)
            times.append(time.perf_counter() - began)
            if found != {f"node-{node}": depth for node, depth in chain.depths.items()}:
                raise AssertionError("the index gave another answer than what was written")
            hashes = [BlockHash(key.to_bytes(8, "little") + bytes(24)) for key in keys]
            began = time.perf_counter()
            index.match(block_keys(hashes))
            from_hashes.append(time.perf_counter() - began)
    return times, from_hashes


def _num_keys(num_blocks: int) -> int:
    return sum(len(chain.keys) for chain in make_chains(num_blocks))


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read in one call
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(measure(sys.argv[1], int(sys.argv[2]))))))
