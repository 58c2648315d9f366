"""SubscribeKvEvents of vllm.grpc.engine: its events are compared with the pool's blocks."""

import asyncio
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from stepwell.common.v1 import common_pb2 as stepwell_common_pb2

from services.common.pool.block_hash import hash_full_blocks
from services.scheduler.adapters.vllm_grpc import event_stream
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import SECONDS, gateway_of
from tests.scheduler.story import prompt
from tests.scheduler.vllm_client import complete, generate_request, status_of, vllm_replica
from tests.scheduler.vllm_events import pool_hashes

ROOT = b"f" * 32
Stub = vllm_engine_pb2_grpc.VllmEngineStub


class View:
    def __init__(self) -> None:
        self.stored: dict[int, bytes] = {}
        """Maps the last 64 bits of a block's hash, as a signed number, to the full hash."""
        self.sequence = -1

    def apply(self, batch: common_pb2.KvEventBatch) -> None:
        """Applies a message, which must be a snapshot or the successor of the last message."""
        if batch.load.load_only:
            assert (batch.sequence_number, len(batch.events)) == (self.sequence, 0)
            return
        if not batch.HasField("snapshot") or batch.snapshot.index:
            assert batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "stored":
                    self._store(event.stored)
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.stored[block_hash]
                case "cleared":
                    self.stored.clear()

    @property
    def hashes(self) -> dict[int, set[int]]:
        """The cached hashes, in the format that `pool_hashes` returns."""
        return {0: {block_hash % 2**64 for block_hash in self.stored}} if self.stored else {}

    def _store(self, stored: common_pb2.KvBlocksStored) -> None:
        parent = (
            self.stored[stored.parent_block_hash] if stored.HasField("parent_block_hash") else ROOT
        )
        assert (stored.kv_cache_spec_kind, stored.group_idx) == ("full_attention", 0)
        for block in stored.blocks:
            salt = "".join(key.text for key in block.extra_keys)
            assert salt in ("", stored.cache_salt)
            (parent,) = hash_full_blocks(
                parent, list(block.token_ids), block.block_size, cache_salt=salt
            )
            assert int.from_bytes(parent[-8:], "big", signed=True) == block.block_hash
            self.stored[block.block_hash] = parent


async def follow(stub: Stub, view: View, begin: int, wanted: dict[int, set[int]]) -> list[int]:
    """Reads messages until the view equals `wanted`. Returns the numbers of the messages."""
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=begin))
    numbers = []
    async with asyncio.timeout(SECONDS):
        async for batch in call:
            view.apply(batch)
            numbers.append(batch.sequence_number)
            if view.hashes == wanted:
                break
    call.cancel()
    return numbers


async def run(stub: Stub, *prompts: list[int]) -> None:
    for number, tokens in enumerate(prompts):
        await complete(stub, generate_request(tokens, request_id=str(number)))


async def test_a_snapshot_and_what_follows_lead_to_what_the_pool_has_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "_CHUNK_BLOCKS", 3)
    async with vllm_replica(tmp_path, FakeWorker(num_blocks=24)) as (replica, stub):
        await run(stub, *(prompt(20, 100 * turn) for turn in range(6)), prompt(24, 400))
        view = View()
        numbers = await follow(stub, view, 0, await pool_hashes(replica.pool_address))
        assert len(numbers) > 2
        await run(stub, *(prompt(20, 150 * turn) for turn in range(6)))
        later = await follow(stub, view, numbers[-1] + 1, await pool_hashes(replica.pool_address))
        assert later[0] == numbers[-1] + 1


async def test_a_subscriber_gets_events_while_requests_run(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        view = View()
        first = await call.read()
        assert isinstance(first, common_pb2.KvEventBatch)
        view.apply(first)
        assert (first.snapshot.count, first.snapshot.blocks, view.sequence) == (1, 0, 0)
        await run(stub, prompt(9))
        wanted = await pool_hashes(replica.pool_address)
        async with asyncio.timeout(SECONDS):
            while view.hashes != wanted:
                batch = await call.read()
                assert isinstance(batch, common_pb2.KvEventBatch)
                view.apply(batch)
        call.cancel()


async def test_the_salt_of_a_request_goes_with_its_blocks(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub), gateway_of(replica) as gateway:
        await gateway.add(1, prompt(9), cache_salt="tenant-a")
        await gateway.finish(1)
        view = View()
        await follow(stub, view, 0, await pool_hashes(replica.pool_address))
        assert len(view.stored) == 4


async def test_the_adapter_of_a_request_goes_with_its_blocks(tmp_path: Path) -> None:
    adapter = stepwell_common_pb2.Adapter(digest=b"a" * 32, name="billing", path="/adapters/one")
    async with (
        vllm_replica(tmp_path, FakeWorker(max_loras=1)) as (replica, stub),
        gateway_of(replica) as gateway,
    ):
        await gateway.add(1, prompt(9), cache_salt="tenant-a", adapter=adapter)
        await gateway.finish(1)
        await replica.until_idle()
        call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        snapshot = await call.read()
        call.cancel()
        assert isinstance(snapshot, common_pb2.KvEventBatch)
        (stored,) = (event.stored for event in snapshot.events if event.HasField("stored"))
        assert (stored.lora_name, stored.cache_salt) == ("billing", "tenant-a")
        keys = [[key.text for key in block.extra_keys] for block in stored.blocks]
        assert keys == [["billing", "tenant-a"], *[["billing"]] * 3]
        assert len({block.lora_id for block in stored.blocks}) == 1


async def test_batches_that_are_not_kept_are_out_of_range(tmp_path: Path) -> None:
    """The package smg, whose client gets this error, then requests a snapshot."""
    async with vllm_replica(tmp_path, kv_events_buffer_steps=2) as (_, stub):
        await run(stub, prompt(9), prompt(9, 300))
        for begin in (1, 1000):
            request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=begin)
            error = await status_of(stub.SubscribeKvEvents(request))
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_the_load_goes_with_events_and_without_them(tmp_path: Path) -> None:
    worker = FakeWorker(max_num_seqs=1, num_blocks=21)
    async with vllm_replica(tmp_path, worker) as (replica, stub):
        worker.going.clear()
        calls = [stub.Generate(generate_request(prompt(9), request_id=str(i))) for i in range(3)]
        await replica.until(lambda stats: (stats.num_running, stats.num_waiting) == (1, 2))
        subscription = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        load = await next_load(subscription)
        assert (load.running_requests, load.waiting_requests, load.load_only) == (1, 2, True)
        assert (load.max_running_requests, load.waiting_uncached_tokens) == (1, 18)
        assert load.token_usage == load.num_used_tokens / 80 > 0
        heartbeat = await next_load(subscription)
        assert (heartbeat.running_requests, heartbeat.load_only) == (1, True)
        assert heartbeat.sample == load.sample + 1
        worker.going.set()
        for call in calls:
            assert [response async for response in call]
        while load.running_requests or load.waiting_requests:
            load = await next_load(subscription)
        assert load.sample > heartbeat.sample
        subscription.cancel()


async def next_load(
    subscription: grpc.aio.UnaryStreamCall[
        common_pb2.SubscribeKvEventsRequest, common_pb2.KvEventBatch
    ],
) -> common_pb2.EngineLoad:
    """Returns the load in the next message that has one."""
    async with asyncio.timeout(SECONDS):
        while True:
            batch = await subscription.read()
            assert isinstance(batch, common_pb2.KvEventBatch)
            if batch.HasField("load"):
                return batch.load
