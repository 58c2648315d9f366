"""KV events over ZMQ, decoded as vLLM's routers do, and compared with the pool's cached blocks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import Unavailable
from tests.scheduler.fake_worker import BLOCK_SIZE, FULL, FakeWorker
from tests.scheduler.paged_model import continuation
from tests.scheduler.serving_replica import Replica, gateway_of, sampling, serving_replica
from tests.scheduler.story import prompt
from tests.scheduler.vllm_events import (
    SECONDS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheView,
    OldBlockStored,
    OldKVEventBatch,
    Subscriber,
    decode,
    pool_hashes,
)

ROOT = b"f" * 32
WINDOW = common_pb2.KVCacheGroup(
    attention_type=common_pb2.ATTENTION_TYPE_SLIDING_WINDOW,
    block_size=BLOCK_SIZE,
    window=2 * BLOCK_SIZE,
    num_layers=2,
)
STATE = common_pb2.KVCacheGroup(
    attention_type=common_pb2.ATTENTION_TYPE_STATE_SPACE,
    block_size=BLOCK_SIZE,
    num_layers=2,
    mamba_cache_mode=common_pb2.MAMBA_CACHE_MODE_ALIGN,
)
WIDE = common_pb2.KVCacheGroup(
    attention_type=common_pb2.ATTENTION_TYPE_FULL, block_size=2 * BLOCK_SIZE, num_layers=2
)


@asynccontextmanager
async def publishing(
    directory: Path, worker: FakeWorker, **settings: Any
) -> AsyncIterator[tuple[Replica, Subscriber]]:
    """A replica that publishes events, and a subscriber."""
    live, replay = f"ipc://{directory}/events", f"ipc://{directory}/replay"
    endpoints = {"kv_events_endpoint": live, "kv_events_replay_endpoint": replay}
    async with serving_replica(worker, **endpoints, **settings) as replica:
        subscriber = Subscriber(live, replay, settings.get("kv_events_topic", ""))
        try:
            yield replica, subscriber
        finally:
            subscriber.close()


async def run(replica: Replica, prompts: list[list[int]], **fields: Any) -> None:
    async with gateway_of(replica) as gateway:
        for handle, tokens in enumerate(prompts):
            await gateway.add(handle, tokens, **fields)
        await gateway.finish(*range(len(prompts)))
    await replica.until_idle()


async def view_of(subscriber: Subscriber) -> tuple[CacheView, list[object]]:
    view, seen = CacheView(ROOT, BLOCK_SIZE), []
    for number, (_, sequence, payload) in enumerate(await subscriber.replay(0)):
        assert sequence == number
        events = decode(payload)
        view.apply(events)
        seen += events
    assert not view.orphans
    return view, seen


async def test_a_request_is_published_with_its_tokens_and_parents(tmp_path: Path) -> None:
    async with publishing(tmp_path, FakeWorker()) as (replica, subscriber):
        await run(replica, [prompt(10)])
        _, seen = await view_of(subscriber)
        # 10 prompt tokens and 8 output tokens, of which the last is not computed, fill 4 blocks.
        stored = [event for event in seen if isinstance(event, BlockStored)]
        tokens = prompt(10) + continuation(prompt(10), 8)
        assert [token for event in stored for token in event.token_ids] == tokens[:16]
        first, *later = stored
        assert (first.parent_block_hash, len(first.block_hashes)) == (None, 2)
        parents = [event.block_hashes[-1] for event in stored]
        assert [event.parent_block_hash for event in later] == parents[:-1]
        assert {(event.block_size, event.medium, event.group_idx) for event in stored} == {
            (BLOCK_SIZE, "GPU", 0)
        }
        assert {event.kv_cache_spec_kind for event in stored} == {"full_attention"}
        assert {(event.lora_id, event.lora_name) for event in stored} == {(None, None)}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "groups",
    [(FULL,), (FULL, WINDOW), (WINDOW, WIDE), (WIDE, WINDOW)],
    ids=["full", "full and window", "window and larger blocks", "larger blocks and window"],
)
async def test_the_events_lead_to_what_the_pool_has_cached(
    tmp_path: Path, asynchronous: bool, groups: tuple[common_pb2.KVCacheGroup, ...]
) -> None:
    """The pool is so small that requests are preempted and blocks are evicted all the time."""
    num_blocks = 20 if WIDE in groups else 24
    worker = FakeWorker(num_blocks=num_blocks, max_model_len=60, groups=groups)
    async with publishing(tmp_path, worker, async_scheduling=asynchronous) as (replica, subscriber):
        shared = prompt(12)
        for turn in range(3):
            await run(
                replica,
                [shared + prompt(5 + 3 * index, 200 * index + turn) for index in range(6)],
                sampling=sampling(20),
            )
        view, seen = await view_of(subscriber)
        assert view.hashes == await pool_hashes(replica.pool_address)
        assert set(view.hashes) == set(range(len(groups)))
        removed = [event for event in seen if isinstance(event, BlockRemoved)]
        assert removed
        assert {event.group_idx for event in removed} == set(range(len(groups)))
        assert (await replica.stats()).num_preemptions > 0


async def test_a_part_of_a_block_is_a_block_of_the_tokens_of_a_hash(tmp_path: Path) -> None:
    """A hash covers 2 tokens and a block 4, so a prefix hit may end inside a block. A prompt of 11
    tokens has two full blocks, and one more hash for tokens 9 and 10.
    """
    worker = FakeWorker(groups=[FULL, STATE])
    async with publishing(tmp_path, worker, prefix_match_unit=2) as (replica, subscriber):
        await run(replica, [prompt(11)], sampling=sampling(1))
        seen = [event for _, _, payload in await subscriber.replay(0) for event in decode(payload)]
        parts = [
            event for event in seen if isinstance(event, BlockStored) and event.block_size == 2
        ]
        assert {event.group_idx for event in parts} == {0, 1}
        assert {tuple(event.token_ids) for event in parts} == {tuple(prompt(11)[8:10])}
        stored: dict[int, set[int]] = {}
        for event in seen:
            if isinstance(event, BlockStored):
                stored.setdefault(event.group_idx or 0, set()).update(event.block_hashes)
        assert stored == await pool_hashes(replica.pool_address)


async def test_the_salt_of_a_request_is_an_extra_key_of_its_first_block(tmp_path: Path) -> None:
    async with publishing(tmp_path, FakeWorker()) as (replica, subscriber):
        await run(replica, [prompt(10)], cache_salt="tenant-a")
        view, seen = await view_of(subscriber)
        first, second, *_ = (event for event in seen if isinstance(event, BlockStored))
        assert first.extra_keys == [("tenant-a",), None]
        assert second.extra_keys == [None]
        assert view.hashes == await pool_hashes(replica.pool_address)


async def test_the_blocks_of_an_adapter_are_named_apart_from_those_of_the_model(
    tmp_path: Path,
) -> None:
    """An adapter is an extra key of each block, before the cache salt, as in vLLM."""
    adapter = common_pb2.Adapter(digest=b"a" * 32, name="billing", path="/adapters/billing")
    async with publishing(tmp_path, FakeWorker(max_loras=1)) as (replica, subscriber):
        await run(replica, [prompt(10)])
        await run(replica, [prompt(10)], adapter=adapter, cache_salt="tenant-a")
        view = CacheView(ROOT, BLOCK_SIZE, adapter_digests={"billing": adapter.digest})
        seen = [event for _, _, payload in await subscriber.replay(0) for event in decode(payload)]
        view.apply(seen)
        assert view.hashes == await pool_hashes(replica.pool_address)
        stored = [event for event in seen if isinstance(event, BlockStored)]
        of_model = [event for event in stored if event.lora_name is None]
        of_adapter = [event for event in stored if event.lora_name == "billing"]
        assert {event.lora_id for event in of_model} == {None}
        (lora_id,) = {event.lora_id for event in of_adapter}
        assert lora_id is not None
        assert 0 < lora_id < 2**31
        keys = [key for event in of_adapter for key in event.extra_keys or ()]
        assert keys == [("billing", "tenant-a"), ("billing",), ("billing",), ("billing",)]
        assert len(view.hashes[0]) == 8


async def test_a_reset_and_a_pool_that_comes_back_clear_all_blocks(tmp_path: Path) -> None:
    async with publishing(tmp_path, FakeWorker()) as (replica, subscriber):
        await run(replica, [prompt(10)])
        await replica.admin.ResetPrefixCache(scheduler_pb2.ResetPrefixCacheRequest())
        view, seen = await view_of(subscriber)
        assert view.hashes == {}
        assert seen[0] == seen[-1] == AllBlocksCleared()
        await run(replica, [prompt(10, 500)])
        await replica.pool.stop()
        await replica.pool.start()
        await run(replica, [prompt(10, 300)])
        view, _ = await view_of(subscriber)
        assert view.hashes == await pool_hashes(replica.pool_address)
        assert len(view.hashes[0]) == 4


async def test_live_batches_and_replayed_ones_are_the_same(tmp_path: Path) -> None:
    topic = "kv@127.0.0.1@paged"
    async with publishing(tmp_path, FakeWorker(), kv_events_topic=topic) as (replica, subscriber):
        live: list[tuple[bytes, int, bytes]] = []
        first = asyncio.create_task(subscriber.receive())
        async with asyncio.timeout(SECONDS):  # a ZMQ subscription takes effect with a delay
            for turn in range(1000):
                await run(replica, [prompt(10, 20 * turn)])
                if first.done():
                    break
        live.append(await first)
        await run(replica, [prompt(30, 900)])
        newest = (await subscriber.replay(0))[-1]
        while live[-1] != newest:
            live.append(await subscriber.receive())
        begin = live[0][1]
        assert {name for name, _, _ in live} == {topic.encode()}
        assert live == await subscriber.replay(begin)
        assert await subscriber.replay(newest[1]) == [newest]
        assert await subscriber.replay(newest[1] + 1) == []
        assert await subscriber.replay(newest[1] + 1000) == []


async def test_only_the_newest_batches_are_kept(tmp_path: Path) -> None:
    async with publishing(tmp_path, FakeWorker(), kv_events_buffer_steps=3) as (
        replica,
        subscriber,
    ):
        await run(replica, [prompt(10), prompt(10, 300)], sampling=sampling(40))
        kept = await subscriber.replay(0)
        assert len(kept) == 3
        assert kept[0][1] > 1


async def test_events_are_arrays_for_consumers_that_expect_them(tmp_path: Path) -> None:
    async with publishing(tmp_path, FakeWorker(), kv_events_encoding="array") as (
        replica,
        subscriber,
    ):
        await run(replica, [prompt(10)])
        batches = [
            msgspec.msgpack.decode(payload, type=OldKVEventBatch)
            for _, _, payload in await subscriber.replay(0)
        ]
        events = [event for batch in batches for event in batch.events]
        stored = [event for event in events if isinstance(event, OldBlockStored)]
        assert stored[0].token_ids == prompt(10)[:8]
        assert (stored[0].group_idx, stored[0].kv_cache_spec_kind) == (0, "full_attention")


async def test_a_request_for_replay_that_is_malformed_is_passed_over(tmp_path: Path) -> None:
    async with publishing(tmp_path, FakeWorker()) as (_, subscriber):
        for frames in ([b"what"], [b"", b"short"], [b"", b"", b"", b""]):
            await subscriber.ask(frames)
        assert len(await subscriber.replay(0)) == 1


async def test_an_endpoint_that_cannot_be_used_ends_the_start_with_a_sentence() -> None:
    with pytest.raises(Unavailable, match="cannot publish KV events at nonsense://"):
        async with serving_replica(FakeWorker(), kv_events_endpoint="nonsense://*"):
            pass
