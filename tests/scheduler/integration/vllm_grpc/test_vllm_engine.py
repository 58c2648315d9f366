"""vLLM's gRPC service vllm.grpc.engine at a scheduler, called with the published stubs."""

import asyncio
import hashlib
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from stepwell.common.v1 import common_pb2 as stepwell_common_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
    Unavailable,
)
from services.common.pool.block_hash import unpack_token_ids
from services.common.request.messages import pooler_to_proto
from services.common.request.pooling import Pooler, PoolingTask, PoolingType
from services.common.rpc.status import from_rpc_error
from services.common.telemetry import names
from tests.otlp_receiver import OtlpReceiver
from tests.scheduler.fake_worker import EOS, FakeWorker
from tests.scheduler.paged_model import VOCAB_SIZE, continuation
from tests.scheduler.seen_spans import received
from tests.scheduler.serving_replica import SECONDS, gateway_of
from tests.scheduler.story import prompt
from tests.scheduler.vllm_client import complete, generate_request, status_of, vllm_replica
from tests.scheduler.vllm_events import pool_hashes

pb = vllm_engine_pb2


async def test_an_answer_is_that_of_a_gateway_s_session(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub), gateway_of(replica) as gateway:
        await gateway.add(1, prompt(9))
        await gateway.finish(1)
        (answer,) = await complete(stub, generate_request(prompt(9)))
        assert list(answer.output_ids) == gateway.heard[1].tokens == continuation(prompt(9), 8)
        assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == (
            "length",
            9,
            8,
        )
        assert answer.cached_tokens == 8
        assert not answer.HasField("output_logprobs")
        assert answer.WhichOneof("matched_stop") is None
        await replica.until_idle()
        assert (await replica.stats()).num_sessions == 1


async def test_a_stream_brings_tokens_as_they_come_and_then_all_of_them(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (_, stub):
        request = generate_request(prompt(9), stream=True)
        *chunks, last = [response async for response in stub.Generate(request)]
        tokens = continuation(prompt(9), 8)
        assert [token for one in chunks for token in one.chunk.token_ids] == tokens
        assert sum(one.chunk.completion_tokens for one in chunks) == 8
        assert {one.chunk.prompt_tokens for one in chunks} == {9}
        assert list(last.complete.output_ids) == tokens
        assert (last.complete.completion_tokens, last.complete.finish_reason) == (8, "length")


async def test_n_answers_come_by_index(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        answers = await complete(stub, generate_request(prompt(9), sampling={"n": 3}))
        assert [answer.index for answer in answers] == [0, 1, 2]
        assert {tuple(answer.output_ids) for answer in answers} == {
            tuple(continuation(prompt(9), 8))
        }
        seeds = {new.sampling.seed for step in replica.worker.steps for new in step.new_requests}
        assert len(seeds) == 3


async def test_a_seed_is_used_as_it_is_and_a_negative_one_too(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        for seed, wanted in ((7, 7), (-1, 2**64 - 1)):
            await complete(stub, generate_request(prompt(9), sampling={"seed": seed}))
            (new,) = replica.worker.steps[-8].new_requests or replica.worker.steps[-9].new_requests
            assert new.sampling.seed == wanted


async def test_answers_end_at_stop_tokens_and_end_of_sequence(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (_, stub):
        tokens = continuation(prompt(9), 8)
        request = generate_request(prompt(9), sampling={"stop_token_ids": [tokens[3]]})
        (answer,) = await complete(stub, request)
        assert (answer.finish_reason, answer.matched_token_id) == ("stop", tokens[3])
        assert list(answer.output_ids) == tokens[:4]


async def test_end_of_sequence_is_the_model_s_unless_it_is_ignored(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        for ignored, wanted in ((False, [EOS]), (True, [])):
            await complete(stub, generate_request(prompt(5), sampling={"ignore_eos": ignored}))
            new = [new for step in replica.worker.steps for new in step.new_requests][-1]
            assert list(new.sampling.eos_token_ids) == wanted


async def test_an_answer_without_a_limit_goes_on_to_the_model_s_length(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path, FakeWorker(max_model_len=40)) as (_, stub):
        for max_tokens in (None, 1000):
            (answer,) = await complete(stub, generate_request(prompt(9), max_tokens))
            assert (answer.completion_tokens, answer.finish_reason) == (31, "length")


async def test_a_prompt_is_cut_from_the_left(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path, FakeWorker(max_model_len=40)) as (replica, stub):
        for limit, length in ((5, 5), (-1, 39), (39, 39)):
            sampling = {"truncate_prompt_tokens": limit}
            (answer,) = await complete(stub, generate_request(prompt(60), 1, sampling=sampling))
            assert answer.prompt_tokens == length
            new = [new for step in replica.worker.steps for new in step.new_requests][-1]
            assert unpack_token_ids(new.token_ids) == prompt(60)[-length:]


async def test_abort_ends_a_call_with_its_reason(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        request = generate_request(prompt(9), 150, stream=True, sampling={"n": 2})
        responses = aiter(stub.Generate(request))
        assert (await anext(responses)).WhichOneof("response") == "chunk"
        await stub.Abort(pb.AbortRequest(request_ids=["another"]))
        await stub.Abort(pb.AbortRequest(request_ids=["request"]))
        *_, one, two = [response async for response in responses]
        assert {one.complete.index, two.complete.index} == {0, 1}
        assert (one.complete.finish_reason, two.complete.finish_reason) == ("abort", "abort")
        await replica.until_idle()


async def test_a_client_that_goes_away_ends_its_requests(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        call = stub.Generate(generate_request(prompt(9), 150, stream=True))
        await call.read()
        call.cancel()
        await replica.until_idle()
        assert (await replica.stats()).num_generated_tokens < 150


async def test_a_client_that_does_not_read_gets_fewer_larger_chunks(tmp_path: Path) -> None:
    worker = FakeWorker(num_blocks=2400, max_num_seqs=16, max_model_len=600)
    async with vllm_replica(tmp_path, worker, max_queue_seconds=0.0) as (replica, stub):
        request = generate_request(prompt(9), 500, stream=True, sampling={"n": 16})
        call = stub.Generate(request)
        await replica.until(lambda stats: stats.num_finished == 16)
        counts: dict[int, int] = dict.fromkeys(range(16), 0)
        num_chunks = 0
        async for response in call:
            if response.WhichOneof("response") == "chunk":
                counts[response.chunk.index] += len(response.chunk.token_ids)
                num_chunks += 1
        assert set(counts.values()) == {500}
        assert num_chunks < 16 * 500 / 2


async def test_a_full_queue_refuses_with_a_hint(tmp_path: Path) -> None:
    worker = FakeWorker(max_num_seqs=1)
    async with vllm_replica(tmp_path, worker, max_num_waiting=1) as (replica, stub):
        worker.going.clear()
        calls = [stub.Generate(generate_request(prompt(9), request_id="one"))]
        await replica.until(lambda stats: stats.num_running == 1)
        calls.append(stub.Generate(generate_request(prompt(9), request_id="two")))
        await replica.until(lambda stats: stats.num_waiting == 1)
        refused = await status_of(stub.Generate(generate_request(prompt(9), request_id="three")))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(refused)
        assert isinstance(error, ResourceExhausted)
        assert error.error_reason == "QUEUE_FULL"
        assert 1.0 <= (error.retry_after_seconds or 0) <= 1.25
        worker.going.set()
        for call in calls:
            assert [response.complete.finish_reason async for response in call] == ["length"]
        await replica.until_idle()


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (generate_request([]), InvalidArgument, "tokenized.input_ids"),
        (generate_request([VOCAB_SIZE]), InvalidArgument, "tokenized.input_ids"),
        (generate_request([2**32 - 1]), InvalidArgument, "tokenized.input_ids"),
        (generate_request(prompt(300)), OutOfRange, "tokenized.input_ids"),
        (generate_request(prompt(5), request_id=""), InvalidArgument, "request_id"),
        (generate_request(prompt(5), 0), InvalidArgument, "sampling_params.max_tokens"),
        (pb.GenerateRequest(request_id="a", text="words"), InvalidArgument, "text"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_its_name(
    tmp_path: Path, request_: pb.GenerateRequest, kind: type[Exception], field: str
) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        error = from_rpc_error(await status_of(stub.Generate(request_)))
        assert type(error) is kind
        assert error.field == field
        assert field in error.message or kind is OutOfRange
        await replica.until_idle()


def with_logprobs(
    step: worker_pb2.ExecuteRequest, answer: worker_pb2.ExecuteResponse
) -> list[worker_pb2.ExecuteResponse]:
    """Adds log-probabilities to the worker's answer to a step of one request: two candidates for
    each output token, and none for prompt tokens.
    """
    num_prompt = sum(len(unpack_token_ids(new.token_ids)) - 1 for new in step.new_requests)
    for index, num_tokens in enumerate(unpack_token_ids(answer.num_tokens)):
        answer.logprobs.add(
            index=index, sampled=logprob_rows(3, num_tokens), prompt=logprob_rows(1, num_prompt)
        )
    return [answer]


def logprob_rows(width: int, count: int) -> stepwell_common_pb2.Logprobs:
    size = width * count
    return stepwell_common_pb2.Logprobs(
        width=width, token_ids=[5] * size, logprobs=[-0.5] * size, ranks=[1] * count
    )


async def test_logprobs_of_output_and_prompt(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.spoil = with_logprobs
    async with vllm_replica(tmp_path, worker) as (replica, stub):
        sampling: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 0}
        (answer,) = await complete(stub, generate_request(prompt(5), sampling=sampling))
        assert list(answer.output_logprobs.token_logprobs) == [-0.5] * answer.completion_tokens
        assert {len(top.values) for top in answer.output_logprobs.top_logprobs} == {2}
        assert len(answer.input_logprobs.token_logprobs) == 5
        (new,) = [new for step in replica.worker.steps for new in step.new_requests]
        assert (new.sampling.logprobs, new.sampling.prompt_logprobs) == (2, 0)


async def test_the_trace_of_the_client_goes_on(tmp_path: Path) -> None:
    """If its `traceparent` is sampled, a request has a span in the client's trace."""
    trace_id = "0123456789abcdef0123456789abcdef"
    collector = OtlpReceiver()
    settings = {"otlp_endpoint": collector.endpoint, "trace_sample_ratio": 0.0}
    try:
        async with vllm_replica(tmp_path, **settings) as (_, stub):
            for given in (f"00-{trace_id}-0123456789abcdef-01", "nonsense"):
                metadata = (("traceparent", given),)
                call = stub.Generate(generate_request(prompt(5)), metadata=metadata)
                assert [response async for response in call]
    finally:
        collector.close()
    spans = [span for span in received(collector) if span.name == names.SPAN_REQUEST]
    assert [span.trace_id for span in spans] == [int(trace_id, 16)]


async def test_health_follows_the_replica(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (replica, stub):
        health = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (True, "")
        await replica.pool.stop()
        async with asyncio.timeout(SECONDS):
            while (  # noqa: ASYNC110 - the state of another task
                health := await stub.HealthCheck(pb.HealthCheckRequest())
            ).healthy:
                await asyncio.sleep(0.01)
        assert "kvpool" in health.message


async def test_a_scheduler_that_drains_refuses(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with vllm_replica(tmp_path, worker, drain_seconds=20.0) as (replica, stub):
        worker.going.clear()
        running = stub.Generate(generate_request(prompt(9)))
        await replica.until(lambda stats: stats.num_running == 1)
        replica.stop.set()
        async with asyncio.timeout(SECONDS):
            while True:
                error = from_rpc_error(await status_of(stub.Generate(generate_request([1]))))
                if isinstance(error, Unavailable):
                    break
        worker.going.set()
        assert [response.complete.finish_reason async for response in running] == ["length"]


async def test_what_the_replica_says_of_itself(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "architectures": ["Llama"], "bos_token_id": [5, 6]}
    (model / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    defaults = {"temperature": 0.5, "top_k": 20, "max_length": 7}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    async with vllm_replica(tmp_path, model=model) as (_, stub):
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length, info.vocab_size) == (
            "paged",
            200,
            VOCAB_SIZE,
        )
        assert info.model_path == info.tokenizer_path == str(model)
        assert (info.model_type, list(info.architectures)) == ("llama", ["Llama"])
        assert (list(info.eos_token_ids), info.bos_token_id, info.pad_token_id) == ([EOS], 5, 0)
        assert info.is_generation
        assert not info.supports_vision
        assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 20}
        await complete(stub, generate_request(prompt(9)))
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused, server.data_parallel_size) == (
            0,
            False,
            1,
        )
        assert (server.block_size, server.max_num_seqs) == (4, 8)
        assert server.last_receive_timestamp > 0


async def test_a_model_that_computes_vectors_generates_nothing(tmp_path: Path) -> None:
    worker = FakeWorker()
    pooler = Pooler(PoolingTask.EMBED, PoolingType.LAST, size=4)
    worker.description.pooler.CopyFrom(pooler_to_proto(pooler))
    async with vllm_replica(tmp_path, worker) as (_, stub):
        assert not (await stub.GetModelInfo(pb.GetModelInfoRequest())).is_generation


async def test_the_load_is_that_of_the_engine(tmp_path: Path) -> None:
    worker = FakeWorker(max_num_seqs=1, num_blocks=21)
    async with vllm_replica(tmp_path, worker) as (replica, stub):
        worker.going.clear()
        calls = [stub.Generate(generate_request(prompt(9), request_id=str(i))) for i in range(3)]
        await replica.until(lambda stats: (stats.num_running, stats.num_waiting) == (1, 2))
        (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 2, 3)
        assert (load.max_total_num_tokens, load.max_running_requests) == (80, 1)
        assert load.num_used_tokens in (12, 16)
        assert load.token_usage == load.num_used_tokens / 80
        assert load.num_waiting_uncached_tokens == 18
        assert not (await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
        worker.going.set()
        for call in calls:
            assert [response async for response in call]


async def test_the_cache_is_flushed_once_no_request_holds_blocks(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with vllm_replica(tmp_path, worker) as (replica, stub):
        worker.going.clear()
        call = stub.Generate(generate_request(prompt(9)))
        await replica.until(lambda stats: stats.num_running == 1)
        flush = asyncio.create_task(_flush(stub, SECONDS))
        worker.going.set()
        assert [response async for response in call]
        assert (await flush).success
        assert await pool_hashes(replica.pool_address) == {}
        call = stub.Generate(generate_request(prompt(9), 150, stream=True))
        await call.read()
        for seconds in (0.0, math.nan):
            answer = await _flush(stub, seconds)
            assert (answer.success, answer.message) == (
                False,
                "the prefix cache was not reset, because requests still use blocks",
            )
        call.cancel()


async def _flush(
    stub: vllm_engine_pb2_grpc.VllmEngineStub, seconds: float
) -> common_pb2.FlushCacheResponse:
    answer: common_pb2.FlushCacheResponse = await stub.FlushCache(
        common_pb2.FlushCacheRequest(timeout_s=seconds)
    )
    return answer


async def test_the_tokenizer_comes_as_an_archive(tmp_path: Path) -> None:
    model = Path(__file__).parents[4] / "models" / "demo"
    async with vllm_replica(tmp_path, model=model) as (_, stub):
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        archive = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [
            *[""] * (len(chunks) - 1),
            hashlib.sha256(archive).hexdigest(),
        ]
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= {*files.namelist()}
            assert "model.safetensors" not in files.namelist()
            assert files.read("tokenizer.json") == (model / "tokenizer.json").read_bytes()


async def test_without_the_model_s_directory_there_is_no_tokenizer(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (_, stub):
        error = from_rpc_error(await status_of(stub.GetTokenizer(common_pb2.GetTokenizerRequest())))
        assert isinstance(error, FailedPrecondition)


async def test_what_is_not_there_is_unimplemented(tmp_path: Path) -> None:
    async with vllm_replica(tmp_path) as (_, stub):
        for call in (
            stub.Embed(pb.EmbedRequest()),
            stub.StartProfile(common_pb2.StartProfileRequest()),
            stub.StopProfile(common_pb2.StopProfileRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
