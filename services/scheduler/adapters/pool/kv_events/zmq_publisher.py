"""Publishes events of the prefix cache over ZMQ in vLLM's format, so that routers made for vLLM can
route to a replica.

A batch is one message of three frames: topic, sequence number (8 bytes, big-endian), and msgpack

    [seconds since 1970, [event, ...], data-parallel rank]

An event is a map with its name under "type". In the older format, which vLLM used until 2026 and
some consumers still expect, an event is an array that begins with its name. A subscriber that
misses sequence numbers sends the first of these to the replay endpoint, a ROUTER socket, which
replies with the batches from that number on, and then with the number -1.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from services.common.errors import Unavailable
from services.common.pool.block_hash import unpack_token_ids
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

logger = logging.getLogger(__name__)

DATA_PARALLEL_RANK = 0
"""The only data-parallel rank, because a replica has no data parallelism."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES = 8
_REPLAY_FRAMES = 3


class EventEncoder:
    """Encodes batches as msgpack, in which events are arrays (with `as_arrays`) or maps."""

    def __init__(self, groups: Sequence[KVCacheGroup], *, as_arrays: bool) -> None:
        self._groups = groups
        self._as_arrays = as_arrays
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, batch: KVEventBatch) -> bytes:
        events = [self._event(event) for event in batch.events]
        payload: bytes = self._encoder.encode([batch.unix_seconds, events, DATA_PARALLEL_RANK])
        return payload

    def _event(self, event: KVCacheEvent) -> Mapping[str, Any] | list[Any]:
        fields = {"type": type(event).__name__, **self._fields(event)}
        return list(fields.values()) if self._as_arrays else fields

    def _fields(self, event: KVCacheEvent) -> dict[str, Any]:
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved(hashes, group_idx):
                return {
                    "block_hashes": [external_block_hash(block) for block in hashes],
                    "medium": MEDIUM,
                    "group_idx": group_idx,
                }
            case AllBlocksCleared():
                return {}

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        group, parent = self._groups[event.group_idx], event.parent_block_hash
        fields = {
            "block_hashes": [external_block_hash(block) for block in event.block_hashes],
            "parent_block_hash": None if parent is None else external_block_hash(parent),
            "token_ids": unpack_token_ids(event.token_ids),
            "block_size": event.block_size,
            "lora_id": event.namespace.lora_id,
            "medium": MEDIUM,
            "lora_name": event.namespace.lora_name or None,
            "extra_keys": event.extra_keys,
            "group_idx": event.group_idx,
            "kv_cache_spec_kind": SPEC_KINDS[group.attention_type],
        }
        if group.attention_type is AttentionType.SLIDING_WINDOW:
            fields["kv_cache_spec_sliding_window"] = group.window
        return fields


class ZmqEventPublisher:
    """Sends every batch of a log to the subscribers, and replays earlier batches on request. Never
    waits: drops batches for a subscriber that lags by more than `max_lag` batches.
    """

    def __init__(
        self,
        log: KVEventLog,
        encoder: EventEncoder,
        *,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        max_lag: int,
    ) -> None:
        """Binds `endpoint` or connects to it, by vLLM's rule. Raises Unavailable if that fails."""
        self._log = log
        self._encoder = encoder
        self._topic = topic.encode()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(max_lag)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc:", "inproc:")):
                self._pub.bind(endpoint)
            else:
                self._pub.connect(endpoint)
            if replay_endpoint is not None:
                self._replay = zmq.asyncio.Context.shadow(self._context).socket(zmq.ROUTER)
                self._replay.set_hwm(max_lag + 1)
                self._replay.bind(replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise Unavailable(f"cannot publish KV events at {endpoint}: {error}") from error
        log.on_batch = self._publish

    async def serve_replay(self) -> None:
        """Serves requests for earlier batches, until cancelled."""
        replay = self._replay
        if replay is None:
            return
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != _REPLAY_FRAMES or len(frames[2]) != _SEQUENCE_BYTES:
                logger.warning(
                    "a replay request for KV events is ignored: it must be an empty frame and a "
                    "number"
                )
                continue
            client, _, number = frames
            begin = max(int.from_bytes(number, "big"), self._log.oldest)
            for batch in self._log.batches(min(begin, self._log.newest + 1)):
                await replay.send_multipart([client, b"", self._topic, *self._frames(batch)])
                await asyncio.sleep(0)
            await replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """Closes the sockets. Unsent messages are dropped."""
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.destroy(linger=0)

    def _publish(self, batch: KVEventBatch) -> None:
        self._pub.send_multipart([self._topic, *self._frames(batch)], zmq.NOBLOCK)

    def _frames(self, batch: KVEventBatch) -> tuple[bytes, bytes]:
        return batch.sequence.to_bytes(_SEQUENCE_BYTES, "big"), self._encoder.encode(batch)
