"""Snapshots of the cached blocks in SubscribeKvEvents of vllm.grpc.engine."""

from smg_grpc_proto.generated import common_pb2

from services.common.pool.block_hash import BlockHash, pack_token_ids
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.scheduler.adapters.pool.kv_events.events import BlockStored, CacheNamespace
from services.scheduler.adapters.pool.kv_events.log import KVEventLog
from services.scheduler.adapters.vllm_grpc.event_stream import EventStream

NUM_EVENTS, NUM_BLOCKS = 20, 75
LARGE = 1056
"""Tokens in a block of attention beside recurrent layers whose state is large."""


async def test_messages_with_large_blocks_are_below_the_limit_of_grpc() -> None:
    """Clients of gRPC accept messages of 4 MiB. A larger one would end each subscription."""
    log = KVEventLog(100)
    for number in range(NUM_EVENTS):
        hashes = tuple(
            BlockHash((number * NUM_BLOCKS + index).to_bytes(32, "big"))
            for index in range(NUM_BLOCKS)
        )
        tokens = pack_token_ids([150_000] * LARGE * NUM_BLOCKS)
        log.append((BlockStored(hashes, None, tokens, 0, CacheNamespace()),))
    group = KVCacheGroup(AttentionType.FULL, LARGE)
    batches = EventStream(log, [group], common_pb2.EngineLoad).batches(0)
    messages = [await anext(batches)]
    while len(messages) < messages[0].snapshot.count:
        messages.append(await anext(batches))
    await batches.aclose()
    assert max(message.ByteSize() for message in messages) < 2**20
    stored = [event.stored for message in messages for event in message.events]
    assert sum(len(one.blocks) for one in stored) == NUM_EVENTS * NUM_BLOCKS
    assert messages[-1].sequence_number == log.newest
