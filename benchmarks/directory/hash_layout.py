"""llm-d's layout in Redis, for comparison (`pkg/kvcache` of llm-d-router).

Each block has a Redis hash with a JSON field for each pod, and a sorted set that maps the engine's
block hash to the Redis hash. A look-up reads every block of a prompt in one pipeline. The client
then ends the match at the first missing block.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.directory.chains import Chain
from benchmarks.directory.log_layout import used_memory
from services.common.redis.connection import RedisConnection

_BLOCKS_PER_CALL = 64
_CALL_SECONDS = 30.0
_NUM_LOOKUPS = 200


@dataclass(frozen=True, slots=True)
class HashFigures:
    """The costs of writing and reading blocks. A block counts once for each node that caches it."""

    num_blocks: int
    bytes_per_block: float
    blocks_per_second: float
    lookup_median_millis: float


async def measure_hashes(redis: RedisConnection, chains: Sequence[Chain]) -> HashFigures:
    """Writes all chains, and looks up some of them."""
    before = await used_memory(redis)
    num_blocks = 0
    began = time.perf_counter()
    for chain in chains:
        for node, depth in chain.depths.items():
            num_blocks += depth
            await _write(redis, chain.keys[:depth], node)
    seconds = time.perf_counter() - began
    after = await used_memory(redis)
    times = []
    for number in range(_NUM_LOOKUPS):
        chain = chains[number % len(chains)]
        began = time.perf_counter()
        found = await _match(redis, chain.keys)
        times.append(time.perf_counter() - began)
        if found != chain.depths:
            raise AssertionError("the layout gave another answer than what was written")
    return HashFigures(
        num_blocks=num_blocks,
        bytes_per_block=(after - before) / num_blocks,
        blocks_per_second=num_blocks / seconds,
        lookup_median_millis=1000 * statistics.median(times),
    )


async def _write(redis: RedisConnection, keys: Sequence[int], node: int) -> None:
    for at in range(0, len(keys), _BLOCKS_PER_CALL):
        commands: list[tuple[object, ...]] = []
        for position, key in enumerate(keys[at : at + _BLOCKS_PER_CALL], at):
            commands.append(("HSET", str(key), _entry(node), ""))
            commands.append(("ZADD", f"engine:{key ^ 1}", position, str(key)))
        await redis.pipeline(commands, _CALL_SECONDS)


async def _match(redis: RedisConnection, keys: Sequence[int]) -> dict[int, int]:
    answers = await redis.pipeline([("HKEYS", str(key)) for key in keys], _CALL_SECONDS)
    depths: dict[int, int] = {}
    holders: set[int] | None = None
    for depth, fields in enumerate(answers):
        here = {json.loads(field)["podIdentifier"] for field in fields}
        here = {int(name.removeprefix("node-")) for name in here}
        lost = set() if holders is None else holders - here
        depths |= dict.fromkeys(lost, depth)
        holders = here if holders is None else holders & here
        if not holders:
            return depths
    return depths | dict.fromkeys(holders or (), len(keys))


def _entry(node: int) -> str:
    return json.dumps({"podIdentifier": f"node-{node}", "deviceTier": "gpu"})
