"""A client of vLLM's gRPC service vllm.grpc.engine, with the published protobuf stubs."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from services.common.rpc.channel import open_channel
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.serving_replica import Replica, serving_replica, until_serving


def generate_request(
    prompt: Sequence[int],
    max_tokens: int | None = 8,
    *,
    request_id: str = "request",
    stream: bool = False,
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> vllm_engine_pb2.GenerateRequest:
    """A request for tokens. By default they are sampled greedily."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, **(sampling or {})}
    return vllm_engine_pb2.GenerateRequest(
        request_id=request_id,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt),
        sampling_params=vllm_engine_pb2.SamplingParams(**params),
        stream=stream,
        **fields,
    )


@asynccontextmanager
async def vllm_replica(
    directory: Path, worker: FakeWorker | None = None, **settings: Any
) -> AsyncIterator[tuple[Replica, vllm_engine_pb2_grpc.VllmEngineStub]]:
    """A replica that serves vllm.grpc.engine, and a stub for it."""
    address = f"unix:{directory}/vllm"
    async with (
        serving_replica(worker or FakeWorker(), vllm_grpc_address=address, **settings) as replica,
        open_channel(address) as channel,
    ):
        await until_serving(channel)
        yield replica, vllm_engine_pb2_grpc.VllmEngineStub(channel)


async def complete(
    stub: vllm_engine_pb2_grpc.VllmEngineStub, request: vllm_engine_pb2.GenerateRequest
) -> list[vllm_engine_pb2.GenerateComplete]:
    """Calls Generate without streaming. Returns the completions, ordered by their index."""
    responses = [response async for response in stub.Generate(request)]
    assert all(response.WhichOneof("response") == "complete" for response in responses)
    return sorted((response.complete for response in responses), key=lambda one: one.index)


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
