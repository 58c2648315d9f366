"""The gRPC service vllm.grpc.engine.VllmEngine over an engine."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc
from stepwell.scheduler.v1 import scheduler_pb2

from services.common.errors import FailedPrecondition, StepwellError
from services.common.process.logs import REQUEST_FIELDS
from services.common.rpc.server import Context
from services.common.telemetry.trace_context import parse_traceparent
from services.scheduler.adapters.gateways.gateway_session import GatewaySession
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.gateways.submitter import RequestSubmitter
from services.scheduler.adapters.vllm_grpc.answers import Answers
from services.scheduler.adapters.vllm_grpc.event_stream import EventStream
from services.scheduler.adapters.vllm_grpc.model_files import ModelFiles
from services.scheduler.adapters.vllm_grpc.replica_info import ReplicaInfo
from services.scheduler.adapters.vllm_grpc.requests import GenerateConverter, with_client_names
from services.scheduler.core.engine.engine_core import EngineCore

_IDLE_POLL_SECONDS = 0.01


@dataclass(eq=False)
class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves each Generate call with its own session. If the client disconnects, the call's
    requests are aborted. If the client reads slowly, a chunk contains the tokens of several steps.
    """

    engine: EngineCore
    sessions: Sessions
    submitter: RequestSubmitter
    converter: GenerateConverter
    info: ReplicaInfo
    files: ModelFiles
    events: EventStream
    _calls: defaultdict[str, set[GatewaySession]] = field(
        init=False, default_factory=lambda: defaultdict(set)
    )

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        """Generates the answers to one prompt, streamed or as a whole."""
        REQUEST_FIELDS.set({"request_id": request.request_id})
        generation = self.converter.convert(
            request, traceparent=_traceparent(context), timeout_seconds=context.time_remaining()
        )
        session = self.sessions.open_call(generation.request_id)
        self._calls[generation.request_id].add(session)
        self.info.received()
        try:
            for message in generation.requests:
                await self._submit(session, message)
            answers, outbox = Answers(generation), session.outbox
            while answers.num_open:
                await outbox.wait()
                if outbox.has_deltas:
                    for response in answers.take(outbox.take()):
                        yield response
        finally:
            self._forget(generation.request_id, session)
            self.engine.changes.abort(self.sessions.close(session))

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        """Ends the requests of Generate calls. Ignores the ids of calls that have ended."""
        for request_id in request.request_ids:
            for session in self._calls.get(request_id, ()):
                self.engine.changes.abort(list(session.requests.values()))
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Whether the replica can run steps and accepts new requests."""
        state = self.sessions.state
        healthy = state.ready and not self.submitter.is_draining
        return vllm_engine_pb2.HealthCheckResponse(
            healthy=healthy, message="" if healthy else state.reason or "draining"
        )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Removes all cached prefixes once no request holds blocks. Fails at the timeout."""
        deadline = time.monotonic() + request.timeout_s
        while True:
            try:
                await self.engine.reset_prefix_cache(preempt_running=False)
            except FailedPrecondition as error:
                if not time.monotonic() < deadline:  # also if the timeout is NaN
                    return common_pb2.FlushCacheResponse(success=False, message=error.message)
                await asyncio.sleep(_IDLE_POLL_SECONDS)
            else:
                return common_pb2.FlushCacheResponse(success=True)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Describes the model, from the worker's description and the model's files."""
        response = self.info.model()
        self.files.describe(response)
        return response

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        return self.info.server()

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """The replica's load. Empty for data-parallel ranks other than 0."""
        return self.info.loads(request.dp_rank)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files, from the model directory that the scheduler's settings name."""
        for chunk in await asyncio.to_thread(lambda: list(self.files.tokenizer_chunks())):
            yield chunk

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        async with aclosing(self.events.batches(request.start_sequence_number)) as batches:
            async for batch in batches:
                yield batch

    async def Embed(
        self, request: vllm_engine_pb2.EmbedRequest, context: Context
    ) -> vllm_engine_pb2.EmbedResponse:
        """Not implemented: this service has no embedding models."""
        await _unimplemented(context, "Embed")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Not implemented: there is no profiler."""
        await _unimplemented(context, "StartProfile")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Not implemented: there is no profiler."""
        await _unimplemented(context, "StopProfile")

    async def _submit(self, session: GatewaySession, message: scheduler_pb2.AddRequest) -> None:
        try:
            await self.submitter.submit(session, message)
        except StepwellError as error:
            raise with_client_names(error) from error

    def _forget(self, request_id: str, session: GatewaySession) -> None:
        calls = self._calls[request_id]
        calls.discard(session)
        if not calls:
            del self._calls[request_id]


def _traceparent(context: Context) -> str:
    metadata = dict(context.invocation_metadata() or ())
    traceparent = metadata.get("traceparent", "")
    if isinstance(traceparent, bytes):
        return ""
    span = parse_traceparent(traceparent)
    return traceparent if span is not None and span.trace_flags.sampled else ""


async def _unimplemented(context: Context, method: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not supported by this service")
