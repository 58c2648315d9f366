"""A worker process serves until SIGTERM. If it cannot start, its error is one sentence."""

import asyncio
import json
import signal
from pathlib import Path

import pytest
import torch
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.protocol import own_release
from services.worker.backends.kv_codes import bytes_of_head
from tests.tiny_models import edit_config, save_tiny_model
from tests.worker.worker_process import DEADLINE_SECONDS, outcome, start, until_serving


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model", "llama")
    return tmp_path / "model"


async def test_serves_until_told_to_stop_and_exits_with_0(directory: Path, tmp_path: Path) -> None:
    """There is no compiler and no cache of compiled kernels on the machine."""
    address = f"unix:{tmp_path / 'worker.sock'}"
    process = await start(
        *("--model", str(directory), "--address", address),
        STEPWELL_WORKER_NUM_BLOCKS="50",
        STEPWELL_WORKER_BATCH_INVARIANT="false",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        CXX="no-such-compiler",
    )
    try:
        await asyncio.wait_for(until_serving(address), DEADLINE_SECONDS)
        async with open_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(
                worker_pb2.DescribeRequest(release=own_release()), timeout=60
            )
        assert (description.model_name, description.num_blocks) == ("model", 50)
    finally:
        process.send_signal(signal.SIGTERM)
    status, lines = await outcome(process)
    assert status == 0
    shown = "\n".join(lines)
    for progress in ("loading LlamaForCausalLM", "KV cache: 50 blocks", "loaded and warmed up"):
        assert progress in shown
    assert "%" not in shown, "what takes a moment needs no progress"
    assert (
        "kernels: torch, not batch-invariant, which are slower than native kernels: no C++" in shown
    )
    assert "computes with 1 thread (as set by --num-threads" in shown
    assert "Traceback" not in shown


async def test_serves_with_keys_and_values_in_8_bits(directory: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'worker.sock'}"
    process = await start(
        *("--model", str(directory), "--address", address, "--num-blocks", "50"),
        *("--kv-cache-dtype", "int8_per_token_head"),
    )
    try:
        await asyncio.wait_for(until_serving(address), DEADLINE_SECONDS)
        async with open_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(
                worker_pb2.DescribeRequest(release=own_release()), timeout=60
            )
    finally:
        process.send_signal(signal.SIGTERM)
    assert (await outcome(process))[0] == 0
    assert (description.dtype, description.kv_cache_dtype) == ("float32", "int8_per_token_head")
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    dim = config["hidden_size"] // config["num_attention_heads"]
    assert description.bytes_per_block == 16 * 2 * heads * bytes_of_head(dim)


async def test_another_kv_cache_dtype_ends_the_start_with_one_sentence(directory: Path) -> None:
    status, lines = await outcome(
        await start("--model", str(directory), "--kv-cache-dtype", "fp8_e4m3")
    )
    assert status == 2
    [sentence] = lines
    assert sentence == (
        "stepwell worker: --kv-cache-dtype must be one of auto|int8_per_token_head, not 'fp8_e4m3'"
    )


async def test_a_damaged_model_ends_the_start_with_one_sentence(directory: Path) -> None:
    edit_config(directory, vocab_size=None)
    status, lines = await outcome(await start("--model", str(directory), "--address", "[::1]:0"))
    assert status == 1
    assert lines == [f"stepwell worker: {directory}/config.json: vocab_size is missing"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_cuda_without_a_gpu_ends_the_start_with_one_sentence(directory: Path) -> None:
    arguments = (
        "--model",
        str(directory),
        "--address",
        "127.0.0.1:0",
        "--device",
        "cuda",
        "--log-level",
        "error",
    )
    status, lines = await outcome(await start(*arguments))
    assert status == 1
    assert lines == [
        "stepwell worker: device is cuda, but torch finds no CUDA device; check the driver, "
        "and that torch was built for CUDA, or set --device cpu"
    ]


async def test_too_little_memory_ends_the_start_with_one_sentence(directory: Path) -> None:
    status, lines = await outcome(
        await start(
            *("--model", str(directory), "--address", "127.0.0.1:0", "--log-level", "error"),
            *("--max-model-len", "512", "--kv-cache-memory-bytes", "100000"),
        )
    )
    assert status == 1
    [sentence] = lines
    assert sentence.startswith(
        "stepwell worker: the KV cache cannot store one sequence of 512 tokens: that needs 0.2 MiB"
    )


async def test_a_taken_port_is_known_before_the_model_is_read(directory: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)  # noqa: ARG005
    port = server.sockets[0].getsockname()[1]
    status, lines = await outcome(
        await start("--model", str(directory), "--address", f"127.0.0.1:{port}")
    )
    server.close()
    assert status == 1
    assert f"stepwell worker: cannot listen on 127.0.0.1:{port}" in lines[-1]
    assert not any("loading" in line for line in lines)


async def test_a_model_that_is_no_directory(tmp_path: Path) -> None:
    status, lines = await outcome(await start("--model", str(tmp_path / "nothing")))
    assert status == 2
    nothing = tmp_path / "nothing"
    assert lines == [f"stepwell worker: --model: there is no directory {nothing}"]
