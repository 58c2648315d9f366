"""Converts prefix-cache events (blocks cached, evicted) to messages of SubscribeKvEvents."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from smg_grpc_proto.generated import common_pb2

from services.common.pool.block_hash import BlockHash, unpack_token_ids
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.scheduler.adapters.pool.kv_events.events import (
    MEDIUM,
    SPEC_KINDS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    external_block_hash,
)
from services.scheduler.adapters.pool.kv_events.log import KVEventLog

_CHUNK_BLOCKS = 4096
_CHUNK_BYTES = 2**20
"""Limits on the blocks, and on the bytes of their tokens, in one message of a snapshot, which is
then far below gRPC's 4 MiB.
"""
_INT64 = 2**63
_LOOK_SECONDS = 0.1
_HEARTBEAT_SECONDS = 1.0


@dataclass(eq=False)
class EventStream:
    """Builds the messages for a subscriber: first a snapshot of the cached blocks, or the batches
    from a given number on, and then all later batches. Each message has the replica's load. If the
    load changes without an event, and at least every second, a message has only the load, and the
    sequence number of the previous message.
    """

    log: KVEventLog
    groups: Sequence[KVCacheGroup]
    load: Callable[[], common_pb2.EngineLoad]
    clock: Callable[[], float] = time.monotonic
    _event_ids: Iterator[int] = field(init=False, default_factory=lambda: count(1))

    async def batches(self, begin: int) -> AsyncGenerator[common_pb2.KvEventBatch]:
        """Yields batches without end. `begin` is the number of the first batch to send, or 0 for a
        snapshot of the cached blocks. Raises Trimmed if this batch is not stored, or if the
        subscriber reads so slowly that a later batch is no longer stored.
        """
        if begin:
            sequence = begin - 1
            self.log.batches(begin)
        else:
            sequence = self.log.newest
            for message in self._snapshot():
                yield message
        loads = _LoadRecords(self.load, self.clock)
        while True:
            for batch in await self._batches_after(sequence):
                sequence = batch.sequence
                yield common_pb2.KvEventBatch(
                    sequence_number=sequence,
                    timestamp=batch.unix_seconds,
                    events=[self._event(event) for event in batch.events],
                    dp_rank=0,
                    load=loads.next(),
                )
            if (record := loads.next_if_due()) is not None:
                yield common_pb2.KvEventBatch(
                    sequence_number=sequence, timestamp=self.log.time(), dp_rank=0, load=record
                )

    async def _batches_after(self, sequence: int) -> list[KVEventBatch]:
        """The batches after number `sequence`. Empty if none arrives within `_LOOK_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                return await self.log.after(sequence)
        return []

    def _snapshot(self) -> Iterator[common_pb2.KvEventBatch]:
        """Yields messages with all blocks that are cached now. Their sequence numbers are
        consecutive, none is negative, and the last is the newest batch's number.
        """
        newest, stored = self.log.newest, self.log.snapshot()
        num_blocks = sum(len(event.block_hashes) for event in stored)
        chunks: list[list[BlockStored]] = [[]]
        size = num_bytes = 0
        for event in _cut(stored):
            size, num_bytes = size + len(event.block_hashes), num_bytes + len(event.token_ids)
            if size > _CHUNK_BLOCKS or num_bytes > _CHUNK_BYTES:
                chunks.append([])
                size, num_bytes = len(event.block_hashes), len(event.token_ids)
            chunks[-1].append(event)
        while len(chunks) > newest + 1:
            chunks[-2:] = [chunks[-2] + chunks[-1]]
        first: tuple[KVCacheEvent, ...] = (AllBlocksCleared(),)
        for index, chunk in enumerate(chunks):
            yield common_pb2.KvEventBatch(
                sequence_number=newest - len(chunks) + 1 + index,
                timestamp=self.log.time(),
                events=[_without_id(self._event(event)) for event in (*first, *chunk)],
                dp_rank=0,
                snapshot=common_pb2.KvSnapshotChunk(
                    index=index, count=len(chunks), blocks=num_blocks
                ),
            )
            first = ()

    def _event(self, event: KVCacheEvent) -> common_pb2.KvCacheEvent:
        event_id = next(self._event_ids)
        match event:
            case BlockStored():
                return common_pb2.KvCacheEvent(event_id=event_id, stored=self._stored(event))
            case BlockRemoved(hashes, group_idx):
                removed = common_pb2.KvBlocksRemoved(
                    block_hashes=map(_signed, hashes),
                    tier=common_pb2.KV_CACHE_TIER_DEVICE,
                    medium=MEDIUM,
                    group_idx=group_idx,
                )
                return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
            case AllBlocksCleared():
                return common_pb2.KvCacheEvent(
                    event_id=event_id, cleared=common_pb2.KvCacheCleared()
                )

    def _stored(self, event: BlockStored) -> common_pb2.KvBlocksStored:
        group = self.groups[event.group_idx]
        tokens, size = unpack_token_ids(event.token_ids), event.block_size
        stored = common_pb2.KvBlocksStored(
            blocks=[
                common_pb2.KvBlock(
                    block_hash=_signed(block_hash),
                    token_ids=tokens[index * size : (index + 1) * size],
                    block_size=size,
                    lora_id=event.namespace.lora_id,
                    extra_keys=[common_pb2.KvBlockExtraKey(text=key) for key in keys or ()],
                )
                for index, (block_hash, keys) in enumerate(
                    zip(event.block_hashes, event.extra_keys, strict=True)
                )
            ],
            tier=common_pb2.KV_CACHE_TIER_DEVICE,
            medium=MEDIUM,
            group_idx=event.group_idx,
            kv_cache_spec_kind=SPEC_KINDS[group.attention_type],
            lora_name=event.namespace.lora_name or None,
            cache_salt=event.namespace.cache_salt or None,
        )
        if event.parent_block_hash is not None:
            stored.parent_block_hash = _signed(event.parent_block_hash)
        if group.attention_type is AttentionType.SLIDING_WINDOW:
            stored.kv_cache_spec_sliding_window = group.window
        return stored


class _LoadRecords:
    """The replica's load in the messages of one subscription."""

    def __init__(
        self, load: Callable[[], common_pb2.EngineLoad], clock: Callable[[], float]
    ) -> None:
        self._load = load
        self._clock = clock
        self._last: common_pb2.EngineLoad | None = None
        self._sent_at = 0.0
        self._num_sent = 0

    def next(self) -> common_pb2.EngineLoad:
        return self._numbered(self._load())

    def next_if_due(self) -> common_pb2.EngineLoad | None:
        """The load for a message without events. None if an equal load was sent recently."""
        load = self._load()
        if load == self._last and self._clock() < self._sent_at + _HEARTBEAT_SECONDS:
            return None
        record = self._numbered(load)
        record.load_only = True
        return record

    def _numbered(self, load: common_pb2.EngineLoad) -> common_pb2.EngineLoad:
        self._last, self._sent_at = load, self._clock()
        record = common_pb2.EngineLoad(sample=self._num_sent)
        record.MergeFrom(load)
        self._num_sent += 1
        return record


def _cut(events: Iterable[BlockStored]) -> Iterator[BlockStored]:
    """Yields the events, split so that each fits in one message of a snapshot."""
    for event in events:
        hashes, parent = event.block_hashes, event.parent_block_hash
        size = len(event.token_ids) // len(hashes)
        most = max(1, min(_CHUNK_BLOCKS, _CHUNK_BYTES // size))
        for start in range(0, len(hashes), most):
            end = start + most
            yield BlockStored(
                hashes[start:end],
                parent,
                event.token_ids[start * size : end * size],
                event.group_idx,
                event.namespace,
            )
            parent = hashes[min(end, len(hashes)) - 1]


def _without_id(event: common_pb2.KvCacheEvent) -> common_pb2.KvCacheEvent:
    """Removes the id of an event, because events of snapshots have none."""
    event.event_id = 0
    return event


def _signed(block_hash: BlockHash) -> int:
    value = external_block_hash(block_hash)
    return value - 2 * _INT64 if value >= _INT64 else value
