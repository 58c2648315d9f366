"""A consumer of KV events as it would be written for vLLM: vLLM's structs, and a view of the cached
blocks.

The structs are copies of vLLM's (`vllm/distributed/kv_events.py`), field by field. Decoding uses no
code of the services.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from stepwell.kvpool.v1 import kvpool_pb2, kvpool_pb2_grpc

from services.common.pool.block_hash import BlockHash, hash_full_blocks
from services.common.rpc.channel import open_channel

SECONDS = 60.0


class _Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(_Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldBlockStored(BlockStored, array_like=True, tag="BlockStored"):
    """BlockStored of vLLM 0.23."""


class OldBlockRemoved(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """BlockRemoved of vLLM 0.23."""


class OldAllBlocksCleared(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    """AllBlocksCleared of vLLM 0.23."""


class OldKVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(slots=True)
class CacheView:
    """The cached blocks, as a router tracks them from events. It recomputes the hashes from tokens,
    so that a wrong token, parent or salt is detected. The event of a block's parent may arrive
    after the block's own, because the parent belongs to another KV-cache group.
    """

    root: bytes
    hash_block_size: int | None = None
    """The number of tokens that a hash covers, by default the block size. If blocks have several
    hashes, an event contains only the last hash of each block.
    """
    stored: dict[int, set[int]] = field(default_factory=dict)
    """Maps each KV-cache group to the hashes of its cached blocks."""
    adapter_digests: Mapping[str, bytes] = field(default_factory=dict)
    """Maps adapters' names to the digests of their contents, on which block hashes depend."""
    digests: dict[int, BlockHash] = field(default_factory=dict)
    """Maps each known 64-bit hash to its full digest, including those that events omit."""
    orphans: list[BlockStored] = field(default_factory=list)
    """Events of blocks whose parent is still unknown."""

    def apply(self, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self.orphans.append(event)
                    while known := [event for event in self.orphans if self._knows_parent(event)]:
                        self.orphans = [one for one in self.orphans if one not in known]
                        for one in known:
                            self._check(one)
                    assert event.group_idx is not None
                    self.stored.setdefault(event.group_idx, set()).update(event.block_hashes)
                case BlockRemoved():
                    assert event.group_idx is not None
                    self.stored[event.group_idx] -= set(event.block_hashes)
                case AllBlocksCleared():
                    self.stored.clear()

    @property
    def hashes(self) -> dict[int, set[int]]:
        """Maps each KV-cache group that has cached blocks to the hashes of these blocks."""
        return {group: hashes for group, hashes in self.stored.items() if hashes}

    def _knows_parent(self, event: BlockStored) -> bool:
        return event.parent_block_hash is None or event.parent_block_hash in self.digests

    def _check(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        assert event.extra_keys is not None
        assert len(event.extra_keys) == len(event.block_hashes)
        names = [] if event.lora_name is None else [event.lora_name]
        assert all(list(keys or ())[: len(names)] == names for keys in event.extra_keys)
        salts = list(event.extra_keys[0] or ())[len(names) :]
        size = self.hash_block_size or event.block_size
        hashes = hash_full_blocks(
            self.root if parent is None else self.digests[parent],
            event.token_ids,
            size,
            cache_salt="".join(salts),
            adapter_digest=self.adapter_digests[names[0]] if names and parent is None else b"",
        )
        short = [_last_64_bits(digest) for digest in hashes]
        num_hashes = event.block_size // size
        assert short[num_hashes - 1 :: num_hashes] == event.block_hashes
        self.digests |= dict(zip(short, hashes, strict=True))


class Subscriber:
    """Receives live batches from one publisher, and requests replays of earlier batches."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(topic.encode())
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        if replay_endpoint is not None:
            self._replay.connect(replay_endpoint)

    async def receive(self) -> tuple[bytes, int, bytes]:
        """Waits for the next live batch. Returns its topic, sequence number and payload."""
        async with asyncio.timeout(SECONDS):
            topic, sequence, payload = await self._live.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), payload

    async def ask(self, frames: list[bytes]) -> None:
        await self._replay.send_multipart(frames)

    async def replay(self, begin: int) -> list[tuple[bytes, int, bytes]]:
        await self.ask([b"", begin.to_bytes(8, "big")])
        batches = []
        async with asyncio.timeout(SECONDS):
            while True:
                empty, topic, sequence, payload = await self._replay.recv_multipart()
                assert empty == b""
                if int.from_bytes(sequence, "big", signed=True) == -1:
                    assert (topic, payload) == (b"", b"")
                    return batches
                batches.append((topic, int.from_bytes(sequence, "big"), payload))

    def close(self) -> None:
        self._context.destroy(linger=0)


def decode(payload: bytes) -> Sequence[BlockStored | BlockRemoved | AllBlocksCleared]:
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert batch.data_parallel_rank == 0
    return batch.events


async def pool_hashes(pool_address: str) -> dict[int, set[int]]:
    async with open_channel(pool_address) as channel:
        stub = kvpool_pb2_grpc.KVPoolStub(channel)
        watching = stub.WatchEvents(kvpool_pb2.WatchEventsRequest(pool_id="replica-0"))
        snapshot = await watching.read()
        watching.cancel()
    assert snapshot.snapshot
    hashes: dict[int, set[int]] = {}
    for event in snapshot.events:
        packed = event.stored.hashes
        hashes.setdefault(event.stored.group, set()).update(
            _last_64_bits(packed[start : start + 32]) for start in range(0, len(packed), 32)
        )
    return {group: found for group, found in hashes.items() if found}


def _last_64_bits(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")
