"""Ranks in separate processes form a group, agree on tokens, and end together."""

import asyncio
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.protocol import own_release
from tests.tiny_models import save_tiny_model
from tests.worker.rank_threads import free_port
from tests.worker.worker_process import DEADLINE_SECONDS, outcome, start, until_serving


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model", "llama")
    return tmp_path / "model"


async def start_ranks(
    directory: Path, *flags: Sequence[str], **environ: str
) -> list[asyncio.subprocess.Process]:
    """Starts a rank for each of `flags`, with torch's environment variables."""
    group = {"WORLD_SIZE": str(len(flags)), "MASTER_PORT": str(free_port()), **environ}
    return [
        await start(
            *("--model", str(directory), "--address", f"unix:{directory}/{rank}.sock", *own),
            **{"RANK": str(rank), **group},
        )
        for rank, own in enumerate(flags)
    ]


async def serving_ranks(directory: Path, *flags: Sequence[str]) -> list[asyncio.subprocess.Process]:
    processes = await start_ranks(directory, *flags)
    for rank in range(len(flags)):
        address = f"unix:{directory}/{rank}.sock"
        await asyncio.wait_for(until_serving(address), DEADLINE_SECONDS)
    return processes


async def test_ranks_agree_on_their_cache_and_a_killed_one_takes_the_other_down(
    directory: Path,
) -> None:
    first, second = await serving_ranks(directory, ["--num-blocks", "50"], ["--num-blocks", "40"])
    for rank in range(2):
        async with open_channel(f"unix:{directory}/{rank}.sock") as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            described = await stub.Describe(
                worker_pb2.DescribeRequest(release=own_release()), timeout=60
            )
        assert (described.rank, described.world_size, described.num_blocks) == (rank, 2, 40)
        # A rank has one of the two key-value heads of both layers, in float32.
        assert described.bytes_per_block == 16 * 2 * 12 * 2 * 4
    began = time.monotonic()
    second.send_signal(signal.SIGKILL)
    status, lines = await outcome(first)
    assert time.monotonic() - began < 60
    assert (status, lines[-1]) == (1, "stepwell worker: rank 1 has ended")
    assert any("exchange tensors through shared memory" in line for line in lines)
    await second.communicate()


async def test_a_new_generation_ends_a_ranks_wait_for_a_step_that_no_other_rank_has(
    directory: Path,
) -> None:
    processes = await serving_ranks(directory, [], [])
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_channel(f"unix:{directory}/{rank}.sock"))
            for rank in range(2)
        ]
        stubs = [worker_pb2_grpc.WorkerStub(channel) for channel in channels]
        half_sent = stubs[0].Execute()
        await half_sent.write(worker_pb2.ExecuteRequest(generation=1, step=7))
        begun = [stub.Execute() for stub in stubs]
        for call in begun:
            await call.write(worker_pb2.ExecuteRequest(generation=2))
        for call in begun:
            response = await asyncio.wait_for(call.read(), DEADLINE_SECONDS)
            assert (response.generation, response.step) == (2, 0)
    for process in processes:
        process.send_signal(signal.SIGTERM)
        status, lines = await outcome(process)
        assert status == 0, lines


async def test_ranks_with_different_settings_end_with_the_difference(directory: Path) -> None:
    processes = await start_ranks(directory, ["--max-num-seqs", "8"], ["--max-num-seqs", "9"])
    for process in processes:
        status, lines = await outcome(process)
        assert status == 1
        assert "max_num_seqs is 8 on rank 0, but 9 on rank 1" in lines[-1]


async def test_a_rank_without_peers_ends_after_the_join_timeout(directory: Path) -> None:
    process, *_ = await start_ranks(directory, ["--join-timeout-seconds", "1"], WORLD_SIZE="2")
    status, lines = await outcome(process)
    assert status == 1
    assert lines[-1] == (
        "stepwell worker: the ranks have not joined within 1 s: rank 1 has not joined"
    )


async def test_a_master_port_in_use_ends_the_start_with_one_sentence(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process, *_ = await start_ranks(directory, [], WORLD_SIZE="2", MASTER_PORT=port)
        status, lines = await outcome(process)
    assert status == 1
    assert lines[-1].startswith(f"stepwell worker: the ranks cannot connect at 127.0.0.1:{port}: ")
    assert not any("Traceback" in line for line in lines)


async def test_a_model_that_cannot_be_divided_ends_the_start_with_one_sentence(
    directory: Path,
) -> None:
    process, *_ = await start_ranks(directory, [], WORLD_SIZE="3")
    status, lines = await outcome(process)
    assert status == 1
    assert lines == [
        f"stepwell worker: {directory}/config.json: 4 attention heads with 2 heads of keys and "
        "values cannot be divided over 3 ranks: tensor_parallel_size may be 2 or less, or a "
        "multiple of 2 up to 4"
    ]
