"""A worker over gRPC: steps in flight, streams that replace older streams, and invalid steps."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.protocol import own_release
from services.common.rpc.server import GrpcServer
from services.common.telemetry.tracing import configure_tracing
from services.worker.adapters.compute import ComputeThread, follow_liveness
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.servicer import WorkerServicer
from services.worker.backends.device import Array, CpuDevice
from services.worker.build import build_worker
from services.worker.core.model_runner import ModelRunner
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.core.worker import Worker
from services.worker.service import GRPC_SERVICE
from services.worker.settings import WorkerSettings
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

DEADLINE_SECONDS = 60
PROMPT = list(range(20, 40))
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def packed(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def unpacked(array: bytes) -> list[int]:
    return np.frombuffer(array, "<i4").tolist()


def new_request(row: int = 0, **sampling: object) -> worker_pb2.NewRequest:
    """A new request with PROMPT, greedy by default, that has room for 64 tokens."""
    blocks = range(1 + 4 * row, 5 + 4 * row)
    return worker_pb2.NewRequest(
        row=row,
        token_ids=packed(*PROMPT),
        num_prompt_tokens=len(PROMPT),
        sampling=common_pb2.SamplingParams(**{"temperature": 0, **sampling}),
        block_tables=[worker_pb2.BlockTable(block_ids=packed(*blocks))],
    )


def step(
    number: int, *entries: tuple[int, int, int], generation: int = 1, **fields: object
) -> worker_pb2.ExecuteRequest:
    """A step. Entries are (batch row, number of scheduled tokens, number of computed tokens)."""
    rows, scheduled, computed = zip(*entries, strict=True) if entries else ((), (), ())
    return worker_pb2.ExecuteRequest(
        generation=generation,
        step=number,
        rows=packed(*rows),
        num_scheduled_tokens=packed(*scheduled),
        num_computed_tokens=packed(*computed),
        **fields,
    )


class HeldRunner:
    """A model runner whose steps end only when the test releases them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.going = threading.Event()
        self._runner = runner

    def reset(self) -> None:
        self._runner.reset()

    def begin(self, step: StepInput) -> StepOutput | PendingOutput:
        self.going.wait(DEADLINE_SECONDS)
        return self._runner.begin(step)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("tiny") / "llama-tiny"
    save_tiny_model(directory, "llama")
    settings = WorkerSettings(
        model=directory, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=40
    )
    return build_worker(settings, "incarnation-1", lambda: None)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def servicer(exporter: InMemorySpanExporter) -> AsyncIterator[WorkerServicer]:
    compute = ComputeThread()
    tracing = configure_tracing("worker", "", 1.0, exporter=exporter)
    yield WorkerServicer(compute, tracing, WorkerMetrics())
    compute.close()


@pytest.fixture
async def channel(servicer: WorkerServicer, listening: str) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer(has_local_streams=True)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, GRPC_SERVICE)
    address = await server.start(listening)
    async with open_channel(address) as channel:
        yield channel
    servicer.close()
    await server.drain(0)


@pytest.fixture
def worker(
    servicer: WorkerServicer, channel: grpc.aio.Channel, loaded: Worker
) -> worker_pb2_grpc.WorkerStub:
    servicer.open(loaded)
    return worker_pb2_grpc.WorkerStub(channel)


class Stream:
    def __init__(self, worker: worker_pb2_grpc.WorkerStub) -> None:
        self.call = worker.Execute()

    async def send(self, *messages: worker_pb2.ExecuteRequest) -> None:
        for message in messages:
            await asyncio.wait_for(self.call.write(message), DEADLINE_SECONDS)

    async def answer(self) -> worker_pb2.ExecuteResponse:
        response = await asyncio.wait_for(self.call.read(), DEADLINE_SECONDS)
        assert response is not grpc.aio.EOF
        return response

    async def error(self) -> grpc.aio.AioRpcError:
        try:
            while True:
                await self.answer()
        except grpc.aio.AioRpcError as error:
            return error

    async def finish(self) -> None:
        await self.call.done_writing()
        assert await asyncio.wait_for(self.call.read(), DEADLINE_SECONDS) is grpc.aio.EOF


async def generate(stream: Stream, count: int) -> list[int]:
    tokens = []
    await stream.send(step(1, (0, len(PROMPT), 0), new_requests=[new_request()]))
    for number in range(count):
        tokens += unpacked((await stream.answer()).token_ids)
        if number + 1 < count:
            await stream.send(step(2 + number, (0, 1, len(PROMPT) + number)))
    await stream.send(step(99, removed_rows=packed(0)))
    await stream.answer()
    return tokens


async def test_describe_answers_with_model_limits_and_cache(
    worker: worker_pb2_grpc.WorkerStub, loaded: Worker
) -> None:
    description = await worker.Describe(
        worker_pb2.DescribeRequest(release=own_release()), timeout=DEADLINE_SECONDS
    )
    assert description.incarnation == "incarnation-1"
    assert description.model_name == "llama-tiny"
    assert description.fingerprint == loaded.description.fingerprint
    assert (description.max_model_len, description.vocab_size) == (512, VOCAB_SIZE)
    assert list(description.eos_token_ids) == [2]
    assert description.num_blocks == 40
    # Two layers, keys and values, two heads of size 12, 16 tokens, 4 bytes.
    assert description.bytes_per_block == 2 * 2 * 2 * 12 * 16 * 4
    assert (description.max_num_seqs, description.max_num_batched_tokens) == (8, 64)
    assert (description.rank, description.world_size, description.dtype) == (0, 1, "float32")
    assert description.kv_cache_sizing.startswith("40 blocks of 16 tokens")
    [group] = description.groups
    assert group.attention_type == common_pb2.ATTENTION_TYPE_FULL
    assert (group.block_size, group.window, group.num_layers) == (16, 0, 2)


async def test_describe_refuses_a_scheduler_of_another_protocol(
    worker: worker_pb2_grpc.WorkerStub,
) -> None:
    request = worker_pb2.DescribeRequest(release=common_pb2.Release(protocol=9, version="9.0"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.Describe(request, timeout=DEADLINE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "this worker has version" in str(caught.value.details())
    assert "the scheduler version 9.0 (protocol 9)" in str(caught.value.details())


async def test_unavailable_until_the_model_is_loaded(
    servicer: WorkerServicer, channel: grpc.aio.Channel, loaded: Worker
) -> None:
    worker = worker_pb2_grpc.WorkerStub(channel)
    health = health_pb2_grpc.HealthStub(channel)
    state = await health.Check(health_pb2.HealthCheckRequest(service=GRPC_SERVICE))
    assert state.status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.Describe(
            worker_pb2.DescribeRequest(release=own_release()), timeout=DEADLINE_SECONDS
        )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await Stream(worker).error()).code() is grpc.StatusCode.UNAVAILABLE
    servicer.open(loaded)
    await worker.Describe(
        worker_pb2.DescribeRequest(release=own_release()), timeout=DEADLINE_SECONDS
    )


async def test_steps_in_flight_use_tokens_that_the_worker_sampled(
    servicer: WorkerServicer, worker: worker_pb2_grpc.WorkerStub, loaded: Worker
) -> None:
    stream = Stream(worker)
    tokens = await generate(stream, 6)
    await stream.finish()

    held = HeldRunner(loaded.runner)
    servicer.open(replace(loaded, runner=cast(ModelRunner, held)))
    ahead = Stream(worker)
    held.going.set()
    await ahead.send(step(0))
    assert not (await ahead.answer()).HasField("slack_nanos")
    held.going.clear()
    await ahead.send(
        step(1, (0, len(PROMPT), 0), new_requests=[new_request()]),
        *(step(2 + number, (0, 1, len(PROMPT) + number)) for number in range(5)),
    )
    # The second step was sent before this call, so it has arrived when the call returns.
    await worker.Describe(
        worker_pb2.DescribeRequest(release=own_release()), timeout=DEADLINE_SECONDS
    )
    held.going.set()
    answers = [await ahead.answer() for _ in range(6)]
    assert [answer.step for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert [token for answer in answers for token in unpacked(answer.token_ids)] == tokens
    assert all(answer.execute_nanos > 0 for answer in answers)
    # A step waits from its arrival until shortly after the step before has ended.
    assert all(0 < answer.queue_nanos >= answer.slack_nanos for answer in answers)
    assert answers[1].slack_nanos > 0
    await ahead.finish()


async def test_a_late_step_reports_its_negative_slack(worker: worker_pb2_grpc.WorkerStub) -> None:
    stream = Stream(worker)
    await stream.send(step(1, (0, len(PROMPT), 0), new_requests=[new_request()]))
    assert not (await stream.answer()).HasField("slack_nanos")
    await asyncio.sleep(0.05)
    await stream.send(step(2, (0, 1, len(PROMPT))))
    late = await stream.answer()
    assert late.slack_nanos < -50_000_000
    await stream.finish()


async def test_a_worker_says_which_generation_it_saw_last(
    worker: worker_pb2_grpc.WorkerStub,
) -> None:
    async def seen() -> int:
        return (
            await worker.Describe(worker_pb2.DescribeRequest(release=own_release()))
        ).seen_generation

    before = await seen()
    stream = Stream(worker)
    await stream.send(step(0, generation=before + 70))
    await stream.answer()
    assert await seen() == before + 70
    await stream.finish()


async def test_a_newer_stream_takes_over_with_an_empty_batch(
    worker: worker_pb2_grpc.WorkerStub,
) -> None:
    old = Stream(worker)
    await old.send(step(1, (0, len(PROMPT), 0), new_requests=[new_request()]))
    first = await old.answer()
    new = Stream(worker)
    tokens = await generate(new, 3)
    assert tokens[:1] == unpacked(first.token_ids)
    error = await old.error()
    assert error.code() is grpc.StatusCode.ABORTED
    assert error.details() == (
        "the stream of steps was ended, because the scheduler has opened a newer stream"
    )


async def test_a_late_stream_of_an_older_generation_leaves_the_newer_one_alone(
    worker: worker_pb2_grpc.WorkerStub,
) -> None:
    newer = Stream(worker)
    await newer.send(step(1, (0, len(PROMPT), 0), generation=8, new_requests=[new_request()]))
    await newer.answer()
    late = Stream(worker)
    await late.send(step(0, generation=7))
    error = await late.error()
    assert error.code() is grpc.StatusCode.ABORTED
    assert error.details() == "generation 7 has ended, because the newer generation 8 has begun"
    await newer.send(step(2, (0, 1, len(PROMPT)), generation=8))
    assert (await newer.answer()).step == 2
    await newer.finish()


async def test_a_stream_that_ends_leaves_nothing_in_the_batch(
    worker: worker_pb2_grpc.WorkerStub,
) -> None:
    stream = Stream(worker)
    await stream.send(step(1, (0, len(PROMPT), 0), new_requests=[new_request()]))
    await stream.answer()
    stream.call.cancel()
    again = Stream(worker)
    assert len(await generate(again, 2)) == 2
    await again.finish()


BAD_STEPS = {
    "removed_rows: row 3 is not in use": step(2, removed_rows=packed(3)),
    "new_requests.row: row 0 is used by another request": step(2, new_requests=[new_request(0)]),
    "rows: row [5] is not in use": step(2, (5, 1, 0)),
    "new_requests.block_tables: block [99] is not from 1 to 39": step(
        2,
        new_requests=[
            worker_pb2.NewRequest(
                row=1,
                token_ids=packed(4),
                num_prompt_tokens=1,
                block_tables=[worker_pb2.BlockTable(block_ids=packed(99))],
            )
        ],
    ),
    "rows: row 1 would have 20 tokens, but its blocks have slots for 16": step(
        2,
        (1, 20, 0),
        new_requests=[
            worker_pb2.NewRequest(
                row=1,
                token_ids=packed(*PROMPT),
                num_prompt_tokens=20,
                block_tables=[worker_pb2.BlockTable(block_ids=packed(9))],
            )
        ],
    ),
    "temperature": step(2, new_requests=[new_request(1, temperature=-1)]),
    "new_requests.adapter_digest: the adapter with digest 0000000000000000 is not loaded in "
    "this worker": step(2, new_requests=[worker_pb2.NewRequest(row=1, adapter_digest=bytes(32))]),
    "removed_rows: 3 bytes are no int32 array": worker_pb2.ExecuteRequest(
        generation=1, step=2, removed_rows=b"abc"
    ),
    "step 1: step: must be above 1, the number of the last step": step(1, (0, 1, 20)),
    "step 2: generation: is 2, but the stream belongs to generation 1": step(
        2, (0, 1, 20), generation=2
    ),
    "drafts of row 0 do not follow its 21 tokens": step(
        2, (0, 2, 19), num_draft_tokens=packed(1), draft_token_ids=packed(5)
    ),
}


@pytest.mark.parametrize("problem", BAD_STEPS)
async def test_a_bad_step_ends_the_stream_and_the_worker_stays_up(
    worker: worker_pb2_grpc.WorkerStub, problem: str
) -> None:
    stream = Stream(worker)
    await stream.send(step(1, (0, len(PROMPT), 0), new_requests=[new_request()]))
    await stream.answer()
    await stream.send(BAD_STEPS[problem])
    error = await stream.error()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in (error.details() or "")
    again = Stream(worker)
    assert len(await generate(again, 2)) == 2
    await again.finish()


class FailingDevice(CpuDevice):
    """A device on which every operation fails, as on a GPU after a kernel's fault."""

    def upload(self, array: Array) -> torch.Tensor:  # noqa: ARG002
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")


async def test_a_worker_whose_device_computes_nothing_any_more_ends(
    channel: grpc.aio.Channel, servicer: WorkerServicer, loaded: Worker
) -> None:
    ended = asyncio.get_running_loop().create_future()
    servicer.device_failed = ended.set_result
    runner = replace(cast(ModelRunner, loaded.runner), device=FailingDevice())
    servicer.open(replace(loaded, runner=runner))
    stream = Stream(worker_pb2_grpc.WorkerStub(channel))
    await stream.send(step(0))
    assert (await stream.error()).code() is grpc.StatusCode.UNAVAILABLE
    sentence = "the device computes nothing any more: CUDA error: an illegal memory access was"
    assert str(await asyncio.wait_for(ended, DEADLINE_SECONDS)) == f"{sentence} encountered"


async def test_log_probabilities_of_prompts_come_with_the_step_that_computes_them(
    worker: worker_pb2_grpc.WorkerStub,
) -> None:
    stream = Stream(worker)
    request = new_request(1, logprobs=3, prompt_logprobs=1)
    await stream.send(
        step(1, (0, 20, 0), (1, 12, 0), new_requests=[new_request(0), request]), step(2, (1, 8, 12))
    )
    [first] = (await stream.answer()).logprobs
    assert first.index == 1
    assert not first.HasField("sampled")
    assert (first.prompt.width, len(first.prompt.ranks)) == (2, 12)
    assert list(first.prompt.token_ids)[::2] == PROMPT[1:13]
    second = await stream.answer()
    [last] = second.logprobs
    assert last.index == 0
    assert list(last.prompt.token_ids)[::2] == PROMPT[13:20]
    assert (last.sampled.width, list(last.sampled.ranks)) == (4, [1])
    assert list(last.sampled.token_ids)[:1] == unpacked(second.token_ids)
    assert list(last.sampled.logprobs)[1:] == sorted(last.sampled.logprobs[1:], reverse=True)
    await stream.finish()


def traceparent(span_id: int) -> str:
    return f"00-{TRACE_ID}-{span_id:016x}-01"


async def test_a_traced_step_becomes_a_span(
    worker: worker_pb2_grpc.WorkerStub, exporter: InMemorySpanExporter
) -> None:
    stream = Stream(worker)
    await stream.send(
        step(1, (0, 12, 0), new_requests=[new_request(0)], traceparent=traceparent(8)),
        step(2, (0, 8, 12)),
        step(3, removed_rows=packed(0)),
    )
    for _ in range(3):
        await stream.answer()
    await stream.finish()
    (span,) = exporter.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}") == ("worker.execute", TRACE_ID)
    assert span.parent is not None
    assert span.parent.span_id == 8
    assert span.attributes is not None
    assert span.attributes["stepwell.num_scheduled_tokens"] == 12
    (started,) = span.events
    assert span.start_time <= started.timestamp <= span.end_time


async def test_untraced_steps_leave_no_spans(
    worker: worker_pb2_grpc.WorkerStub, exporter: InMemorySpanExporter
) -> None:
    stream = Stream(worker)
    await generate(stream, 3)
    await stream.finish()
    assert exporter.get_finished_spans() == ()


async def test_draining_ends_the_stream(
    worker: worker_pb2_grpc.WorkerStub, servicer: WorkerServicer
) -> None:
    stream = Stream(worker)
    await stream.send(step(1, (0, len(PROMPT), 0), new_requests=[new_request()]))
    await stream.answer()
    servicer.close()
    assert (await stream.error()).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_with_an_overdue_step_is_not_live(loaded: Worker) -> None:
    held, compute, server = HeldRunner(loaded.runner), ComputeThread(), GrpcServer()
    servicer = WorkerServicer(compute, configure_tracing("worker", "", 1.0), WorkerMetrics())
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, GRPC_SERVICE)
    servicer.open(replace(loaded, runner=cast(ModelRunner, held)))
    following = asyncio.create_task(follow_liveness(compute, server.set_live))
    async with open_channel(await server.start("127.0.0.1:0")) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=""))

        async def becomes(state: int) -> None:
            async with asyncio.timeout(DEADLINE_SECONDS):
                assert (await watch.read()).status == state

        await becomes(health_pb2.HealthCheckResponse.SERVING)
        first = Stream(worker_pb2_grpc.WorkerStub(channel))
        await first.send(step(1, (0, 20, 0), new_requests=[new_request()], timeout_millis=200))
        await becomes(health_pb2.HealthCheckResponse.NOT_SERVING)
        # A scheduler that connects again must wait. The worker still counts as not live.
        second = Stream(worker_pb2_grpc.WorkerStub(channel))
        await second.send(step(0, generation=2, timeout_millis=200))
        assert isinstance(await first.error(), grpc.aio.AioRpcError)
        held.going.set()
        answer = await second.answer()
        assert (answer.generation, answer.step) == (2, 0)
        await becomes(health_pb2.HealthCheckResponse.SERVING)
        watch.cancel()
    following.cancel()
    servicer.close()
    await server.drain(0)
    compute.close()
