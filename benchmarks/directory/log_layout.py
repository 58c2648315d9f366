"""Stepwell's layout in Redis: a log, and a snapshot for each node."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.directory.chains import NUM_NODES, Chain
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.pool.kv_directory import (
    KeyBatch,
    NodeLease,
    NodeRecord,
    NodeSnapshot,
    digest_of,
)
from services.common.redis.connection import RedisConnection
from services.common.redis.directory_layout import (
    FIELD,
    DirectoryKeys,
    batch_to_bytes,
    lease_to_bytes,
    record_to_bytes,
    snapshot_to_bytes,
)
from services.kvpool.adapters.node_writer import in_turns

FINGERPRINT = b"benchmark" + bytes(23)
KEYS_PER_ENTRY = 64
_ENTRIES_PER_CALL = 64
_SHARE_IN_SNAPSHOTS = 0.9
_LEASE_MILLIS = 3_600_000
_CALL_SECONDS = 30.0
_GROUPS = (KVCacheGroup(AttentionType.FULL, 16),)


@dataclass(frozen=True, slots=True)
class LogFigures:
    """The costs of writing the blocks. A block is counted once for each node that caches it."""

    num_blocks: int
    num_entries: int
    log_bytes_per_block: float
    snapshot_bytes_per_block: float
    entries_per_second: float
    blocks_per_second: float


@dataclass(slots=True)
class _Node:
    """A node (a pool in the directory) whose blocks are being written."""

    name: str
    epoch: int
    sequence: int = 0
    log_id: str = "0-0"
    keys: list[int] = field(default_factory=list)


async def write_log(redis: RedisConnection, chains: Sequence[Chain]) -> LogFigures:
    """Writes all chains in log entries of up to 64 keys, as the pools' writers do.

    Snapshots are written when nine tenths of the entries are in the log. A reader therefore needs
    the snapshots and the rest of the log.
    """
    names = DirectoryKeys.of(FINGERPRINT)
    nodes = [_Node(f"node-{number}", number + 1) for number in range(NUM_NODES)]
    entries = list(_entries(chains))
    split = int(len(entries) * _SHARE_IN_SNAPSHOTS)
    before = await used_memory(redis)
    began = time.perf_counter()
    await _append(redis, names, nodes, entries[:split])
    seconds = time.perf_counter() - began
    in_log = await used_memory(redis)
    for node in nodes:
        snapshot = NodeSnapshot(node.epoch, node.sequence, node.log_id)
        value = await in_turns(snapshot_to_bytes(snapshot, node.keys))
        command = ("SET", names.snapshot(node.name, node.epoch), value)
        await redis.pipeline([command], _CALL_SECONDS)
    after = await used_memory(redis)
    num_written = sum(len(node.keys) for node in nodes)
    await _append(redis, names, nodes, entries[split:])
    for node in nodes:
        record = NodeRecord(node.name, node.epoch, 1, _GROUPS)
        lease = NodeLease(node.epoch, node.sequence, digest_of(node.keys))
        await redis.pipeline(
            [
                ("HSET", names.nodes, node.name, record_to_bytes(record)),
                ("SET", names.lease(node.name), lease_to_bytes(lease), "PX", _LEASE_MILLIS),
            ],
            _CALL_SECONDS,
        )
    return LogFigures(
        num_blocks=sum(len(node.keys) for node in nodes),
        num_entries=len(entries),
        log_bytes_per_block=(in_log - before) / num_written,
        snapshot_bytes_per_block=(after - in_log) / num_written,
        entries_per_second=split / seconds,
        blocks_per_second=num_written / seconds,
    )


async def used_memory(redis: RedisConnection) -> int:
    """Bytes that Redis has allocated."""
    info = await redis.call(lambda client: client.info("memory"), _CALL_SECONDS)
    return int(info["used_memory"])


def _entries(chains: Sequence[Chain]) -> list[tuple[int, Sequence[int]]]:
    """The log entries, as pairs of a node's number and some of its block keys."""
    return [
        (number, chain.keys[at : min(at + KEYS_PER_ENTRY, depth)])
        for chain in chains
        for number, depth in chain.depths.items()
        for at in range(0, depth, KEYS_PER_ENTRY)
    ]


async def _append(
    redis: RedisConnection,
    names: DirectoryKeys,
    nodes: Sequence[_Node],
    entries: Sequence[tuple[int, Sequence[int]]],
) -> None:
    for at in range(0, len(entries), _ENTRIES_PER_CALL):
        commands = []
        part = entries[at : at + _ENTRIES_PER_CALL]
        for number, keys in part:
            node = nodes[number]
            node.sequence += 1
            node.keys.extend(keys)
            value = batch_to_bytes(KeyBatch(node.epoch, node.sequence, keys))
            commands.append(("XADD", names.log, "*", FIELD, value))
        answers = await redis.pipeline(commands, _CALL_SECONDS)
        for (number, _), log_id in zip(part, answers, strict=True):
            nodes[number].log_id = log_id.decode()
