"""A worker without a model, which serves stepwell.worker.v1 over gRPC and fails on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
from opentelemetry.trace import SpanKind
from stepwell.common.v1 import common_pb2
from stepwell.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import InternalError, InvalidArgument
from services.common.pool.block_hash import pack_token_ids, unpack_token_ids
from services.common.rpc.message_limits import MAX_STEP_BYTES
from services.common.rpc.protocol import PROTOCOL, OtherProtocol, own_release
from services.common.rpc.server import GrpcServer
from services.common.telemetry import names
from services.common.telemetry.tracing import Tracing
from services.scheduler.adapters.replica import ReplicaShape
from tests.scheduler.paged_model import VOCAB_SIZE, NewRow, PagedModel, Work

BLOCK_SIZE = 4
EOS = 2

FULL = common_pb2.KVCacheGroup(
    attention_type=common_pb2.ATTENTION_TYPE_FULL, block_size=BLOCK_SIZE, num_layers=2
)

Spoil = Callable[
    [worker_pb2.ExecuteRequest, worker_pb2.ExecuteResponse], Sequence[worker_pb2.ExecuteResponse]
]
_Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """One rank that runs a `PagedModel` (a simulated model that checks the KV cache). Tests can
    block its steps or make them fail.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 200,
        fingerprint: bytes = b"f" * 32,
        rank: int = 0,
        world_size: int = 1,
        pipeline_parallel_size: int = 1,
        groups: Sequence[common_pb2.KVCacheGroup] = (FULL,),
        drop_last_hit_block: bool = False,
        max_loras: int = 0,
        tracing: Tracing | None = None,
    ) -> None:
        self.description = worker_pb2.DescribeResponse(
            release=own_release(),
            incarnation=f"worker-{id(self)}",
            model_name="paged",
            fingerprint=fingerprint,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            hidden_size=2,
            eos_token_ids=[EOS],
            groups=groups,
            drop_last_hit_block=drop_last_hit_block,
            num_blocks=num_blocks,
            bytes_per_block=1024,
            dtype="bfloat16",
            kv_cache_dtype="int8_per_token_head",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            rank=rank,
            world_size=world_size,
            pipeline_parallel_size=pipeline_parallel_size,
            max_loras=max_loras,
            max_cpu_loras=max_loras,
        )
        self.protocol = PROTOCOL
        self.steps: list[worker_pb2.ExecuteRequest] = []
        self.prepared: list[str] = []
        """The grammars that the worker was asked to compile."""
        self.compiles = asyncio.Event()
        """Compilations of grammars do not end until this event is set."""
        self.compiles.set()
        self.nan_rows: frozenset[int] = frozenset()
        self.refused_rows: frozenset[int] = frozenset()
        self.poison: int | None = None
        """A new request with this token makes the worker end the stream of steps (None: none)."""
        self.described: Callable[[], object] = lambda: None
        """Called when an answer to Describe has been built but not sent."""
        self.spoil: Spoil = lambda _, answer: [answer]
        """Replaces the answer to a step by a list of answers."""
        self.going = asyncio.Event()
        self.going.set()
        self._tracing = tracing
        self._server: GrpcServer | None = None
        self._address = "127.0.0.1:0"

    async def start(self) -> str:
        """Starts to serve, at the address of the last start if there was one. Returns it."""
        self._server = GrpcServer(has_local_streams=True, max_received_bytes=MAX_STEP_BYTES)
        self._server.add(
            worker_pb2_grpc.add_WorkerServicer_to_server, self, "stepwell.worker.v1.Worker"
        )
        self._address = await self._server.start(self._address)
        await self._server.set_ready(True)
        return self._address

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.drain(0)

    async def Describe(  # noqa: N802
        self,
        request: worker_pb2.DescribeRequest,
        context: _Context,  # noqa: ARG002
    ) -> worker_pb2.DescribeResponse:
        if request.release.protocol != self.protocol:
            raise OtherProtocol(
                f"this worker has version 9.0 (protocol {self.protocol}), the scheduler version "
                f"{request.release.version} (protocol {request.release.protocol})"
            )
        answer = worker_pb2.DescribeResponse()
        answer.CopyFrom(self.description)
        self.described()
        return answer

    async def PrepareGrammar(  # noqa: N802
        self,
        request: worker_pb2.PrepareGrammarRequest,
        context: _Context,  # noqa: ARG002
    ) -> worker_pb2.PrepareGrammarResponse:
        """Compiles every grammar except "(", which is refused."""
        self.prepared.append(request.structured_outputs.text)
        await self.compiles.wait()
        if request.structured_outputs.text == "(":
            raise InvalidArgument("unclosed group")
        return worker_pb2.PrepareGrammarResponse()

    async def LoadAdapter(  # noqa: N802
        self,
        request: worker_pb2.LoadAdapterRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> worker_pb2.LoadAdapterResponse:
        """Loads nothing, because the simulated model computes the same tokens for each adapter."""
        return worker_pb2.LoadAdapterResponse()

    async def Execute(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker_pb2.ExecuteRequest],
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        groups = ReplicaShape(self.description, self.description.num_blocks).groups
        model = PagedModel(BLOCK_SIZE, self.description.max_num_seqs, groups=groups)
        async for step in request_iterator:
            self.steps.append(step)
            if any(self.poison in unpack_token_ids(new.token_ids) for new in step.new_requests):
                raise InternalError("the step failed")
            response = self._run(model, step)
            await self.going.wait()
            for answer in self.spoil(step, response):
                yield answer

    def _run(
        self, model: PagedModel, step: worker_pb2.ExecuteRequest
    ) -> worker_pb2.ExecuteResponse:
        rows = unpack_token_ids(step.rows)
        tokens = model.run(
            unpack_token_ids(step.removed_rows),
            [_row(request) for request in step.new_requests],
            _appended(step),
            [
                Work(*numbers)
                for numbers in zip(
                    rows,
                    unpack_token_ids(step.num_scheduled_tokens),
                    unpack_token_ids(step.num_computed_tokens),
                    strict=True,
                )
            ],
            unpack_token_ids(step.block_ids_to_zero),
        )
        per_stage = self.description.world_size // self.description.pipeline_parallel_size
        if self.description.rank < self.description.world_size - per_stage:
            tokens = [[] for _ in tokens]  # only the last pipeline stage samples
        if self._tracing is not None and step.traceparent:
            self._tracing.start(
                names.SPAN_WORKER_EXECUTE, step.traceparent, kind=SpanKind.SERVER
            ).end()
        refused = [index for index, row in enumerate(rows) if row in self.refused_rows]
        return worker_pb2.ExecuteResponse(
            generation=step.generation,
            step=step.step,
            num_tokens=pack_token_ids(list(map(len, tokens))),
            token_ids=pack_token_ids([token for ids in tokens for token in ids]),
            nan_requests=pack_token_ids(
                [index for index, row in enumerate(rows) if row in self.nan_rows]
            ),
            refused_requests=pack_token_ids(refused),
            refused_tokens=pack_token_ids([0] * len(refused)),
        )


def _row(request: worker_pb2.NewRequest) -> NewRow:
    return NewRow(
        request.row,
        unpack_token_ids(request.token_ids),
        [unpack_token_ids(table.block_ids) for table in request.block_tables],
    )


def _appended(step: worker_pb2.ExecuteRequest) -> dict[int, list[list[int]]]:
    appended: dict[int, list[list[int]]] = {}
    for group in step.appended_blocks:
        blocks, start = unpack_token_ids(group.block_ids), 0
        counts = unpack_token_ids(group.num_blocks)
        for row, count in zip(unpack_token_ids(group.rows), counts, strict=True):
            appended.setdefault(row, []).append(blocks[start : start + count])
            start += count
    return appended
