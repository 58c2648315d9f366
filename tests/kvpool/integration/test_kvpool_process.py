"""The process `stepwell kvpool` serves, exports metrics, drains on SIGTERM and exits with 0."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.request import urlopen

import pytest
from stepwell.kvpool.v1 import kvpool_pb2_grpc

from services.common.errors import StepwellError
from services.common.rpc.channel import open_channel
from tests.kvpool import wire
from tests.kvpool.wire import Speaker

STARTED_SECONDS = 60.0


async def test_it_drains_on_sigterm_and_exits_with_success():
    async with (
        pool_process("--drain-seconds", "20") as (process, addresses),
        open_channel(addresses["serving"]) as channel,
    ):
        speaker = await opened_speaker(channel)
        await speaker.transact(wire.admit(wire.admission(1, 9)))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(wire.SECONDS):
            while b"stopping" not in (line := await process.stderr.readline()):
                assert line, "it ended without a word"
        # A pool that drains still executes the transactions of an open stream.
        assert (await speaker.transact(wire.release(1))).num_free_blocks == 9
        await speaker.end()
        async with asyncio.timeout(wire.SECONDS):
            assert await process.wait() == 0


async def test_a_speaker_that_does_not_end_is_ended():
    async with (
        pool_process("--drain-seconds", "0.1") as (process, addresses),
        open_channel(addresses["serving"]) as channel,
    ):
        speaker = await opened_speaker(channel)
        await speaker.transact()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(wire.SECONDS):
            with pytest.raises(StepwellError):
                await speaker.read()
            assert await process.wait() == 0


async def test_metrics_are_served_in_vllms_names():
    async with pool_process("--metrics-address", "127.0.0.1:0") as (_, addresses):
        async with open_channel(addresses["serving"]) as channel:
            speaker = await opened_speaker(channel, num_blocks=11)
            await speaker.transact(wire.admit(wire.admission(1, 9, path="ab")))
            await speaker.transact(wire.admit(wire.admission(2, 9, hit=8, path="ab")))
            await speaker.end()
        lines = (await asyncio.to_thread(scrape, addresses["serving metrics"])).splitlines()
    assert 'stepwell_kvpool_usage_perc{engine="replica"} 0.4' in lines
    assert 'vllm:prefix_cache_queries_total{engine="replica"} 16.0' in lines
    assert 'vllm:prefix_cache_hits_total{engine="replica"} 8.0' in lines
    assert 'stepwell_kvpool_transactions_total{engine="replica"} 2.0' in lines


async def test_metrics_tell_how_long_blocks_live_lie_idle_and_wait_for_their_reuse():
    async with pool_process("--metrics-address", "127.0.0.1:0") as (_, addresses):
        async with open_channel(addresses["serving"]) as channel:
            speaker = await opened_speaker(channel, num_blocks=4)
            await speaker.transact(wire.admit(wire.admission(1, 12, path="abc")))  # transaction 1
            await speaker.transact(wire.release(1))
            await speaker.transact(wire.lookup(2, 8, "ab"))
            # Transaction 4 hits two blocks that were freed two transactions ago. It evicts the
            # block of "abc", which was cached for three transactions and free for two.
            await speaker.transact(wire.admit(wire.admission(2, 9, hit=8)))
            await speaker.transact(wire.release(2), wire.reset())
            await speaker.end()
        lines = (await asyncio.to_thread(scrape, addresses["serving metrics"])).splitlines()
    for name, value in {
        "evictions_total": 1,
        "reuses_total": 2,
        "resets_total": 1,
        "cached_hashes": 0,
        "block_lifetime_transactions_count": 1,
        "block_lifetime_transactions_sum": 3,
        "block_idle_before_evict_transactions_count": 1,
        "block_idle_before_evict_transactions_sum": 2,
        "block_reuse_gap_transactions_count": 2,
        "block_reuse_gap_transactions_sum": 4,
    }.items():
        assert f'stepwell_kvpool_{name}{{engine="replica"}} {value:.1f}' in lines


async def test_an_address_that_is_taken_ends_it_with_one_sentence():
    async with pool_process() as (_, addresses):
        process = await asyncio.create_subprocess_exec(
            *command(addresses["serving"]), stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(STARTED_SECONDS):
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert f"stepwell kvpool: cannot listen on {addresses['serving']}" in errors.decode()


@asynccontextmanager
async def pool_process(
    *flags: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """A running pool, and the addresses in its log: "serving", "serving metrics"."""
    process = await asyncio.create_subprocess_exec(
        *command("127.0.0.1:0", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stderr is not None
    addresses: dict[str, str] = {}
    try:
        async with asyncio.timeout(STARTED_SECONDS):
            while "serving" not in addresses:
                line = (await process.stderr.readline()).decode()
                assert line, "the service ended before it served"
                if " address=" in line:
                    said, address = line.strip().rsplit(" address=", 1)
                    addresses[said.partition("kvpool: ")[2]] = address
        yield process, addresses
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def command(address: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "services.kvpool", "--address", address, *flags]


async def opened_speaker(channel, **shape) -> Speaker:
    stub = kvpool_pb2_grpc.KVPoolStub(channel)
    opened = await stub.OpenPool(wire.open_request(**shape))
    return Speaker(stub, opened.generation)


def scrape(address: str) -> str:
    with urlopen(f"http://{address}/metrics", timeout=wire.SECONDS) as response:
        return response.read().decode()
