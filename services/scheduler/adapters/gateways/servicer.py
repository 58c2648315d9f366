"""The scheduler's gRPC service for gateways."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import InvalidArgument, StepwellError
from services.common.request.finish import FinishReason
from services.common.request.program import MAX_TOOL_BYTES
from services.common.rpc.protocol import require_same_protocol
from services.common.rpc.server import Context
from services.common.telemetry.span_collector import SpanCollector
from services.common.telemetry.span_encoding import encoded_spans
from services.scheduler.adapters.gateways.gateway_session import GatewaySession, StreamWriter
from services.scheduler.adapters.gateways.sessions import Sessions
from services.scheduler.adapters.gateways.submitter import RequestSubmitter
from services.scheduler.adapters.telemetry.activity import MAX_CELLS, Activity
from services.scheduler.adapters.telemetry.statistics import Statistics
from services.scheduler.adapters.telemetry.step_tracer import StepTracer
from services.scheduler.core.engine.engine_core import EngineCore

MAX_RUNNING_REQUESTS = 64
"""Limit on the number of running requests whose spans a call may request."""
OPEN_SECONDS = 10.0
"""Time within which the first message of a session must arrive. A gateway sends it at once."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Serves gateways' sessions (gRPC streams). `opened` is the first message of each session."""

    engine: EngineCore
    submitter: RequestSubmitter
    sessions: Sessions
    statistics: Statistics
    activity: Activity
    tracer: StepTracer
    opened: scheduler_pb2.SessionOpened
    _spans_so_far: SpanCollector = field(
        init=False, default_factory=lambda: SpanCollector("scheduler")
    )

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                first = await anext(request_iterator, None)
        except TimeoutError as error:
            problem = f"the first message of a session did not arrive within {OPEN_SECONDS:g} s"
            raise InvalidArgument(problem, field="open") from error
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidArgument("the first message of a session must be open", field="open")
        require_same_protocol("the gateway", first.open.release, "scheduler")
        if first.number != 1:
            raise InvalidArgument(
                f"the first message of a session must have number 1, not {first.number}",
                field="number",
            )
        session = self.sessions.open(first.open.gateway_id)
        session.take(first)
        reader = asyncio.create_task(self._read(session, request_iterator))
        logger.info("the session of gateway %s has begun", session.gateway_id)
        try:
            yield session.numbered(scheduler_pb2.SessionResponse(opened=self.opened))
            state = scheduler_pb2.SessionResponse(state=self.sessions.state)
            yield session.numbered(state)
            session.writer = context if isinstance(context, StreamWriter) else None
            async for response in self._responses(session, reader):
                yield session.numbered(response)
            if reader.done():
                reader.result()
        except InvalidArgument as error:
            logger.warning(
                "the session of gateway %s is closed, because a message is invalid: %s",
                session.gateway_id,
                error.message,
            )
            raise
        finally:
            reader.cancel()
            aborted = self.sessions.close(session)
            self.engine.changes.abort(aborted)
            logger.info(
                "the session of gateway %s has ended; %d requests aborted",
                session.gateway_id,
                len(aborted),
            )

    async def GetStats(
        self, request: scheduler_pb2.GetStatsRequest, context: Context
    ) -> scheduler_pb2.GetStatsResponse:
        message = self.statistics.message()
        message.drained = self.submitter.is_drained
        return message

    async def GetActivity(
        self, request: scheduler_pb2.GetActivityRequest, context: Context
    ) -> scheduler_pb2.GetActivityResponse:
        if request.max_cells > MAX_CELLS:
            raise InvalidArgument(f"max_cells must be at most {MAX_CELLS}", field="max_cells")
        message = await self.activity.message(request)
        message.stats.drained = self.submitter.is_drained
        return message

    async def GetRunningSpans(
        self, request: scheduler_pb2.GetRunningSpansRequest, context: Context
    ) -> scheduler_pb2.GetRunningSpansResponse:
        if len(request.requests) > MAX_RUNNING_REQUESTS:
            raise InvalidArgument(
                f"requests must have at most {MAX_RUNNING_REQUESTS} entries", field="requests"
            )
        for one in request.requests:
            self.tracer.so_far(one.request_id, one.traceparent, self._spans_so_far.tracing)
        encoded = await asyncio.to_thread(encoded_spans, self._spans_so_far.take())
        return scheduler_pb2.GetRunningSpansResponse(otlp=encoded.SerializeToString())

    async def _read(
        self, session: GatewaySession, messages: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> None:
        async for message in messages:
            session.take(message)
            match message.WhichOneof("message"):
                case "add":
                    await self._add(session, message.add)
                case "adds":
                    for add in message.adds.requests:
                        await self._add(session, add)
                case "chunk":
                    try:
                        await self.submitter.submit_chunk(session, message.chunk)
                    except StepwellError as error:
                        session.reject(message.chunk.handle, error)
                case "abort":
                    self._abort(session, message.abort)
                case "end_turn":
                    self._end_turn(session, message.end_turn)
                case "keep":
                    keep = message.keep
                    self.tracer.keep(keep.request_id, keep.traceparent, keep.tracestate)
                case kind:
                    raise InvalidArgument(
                        "a message after the first of a session must be add, adds, chunk, abort, "
                        f"end_turn or keep, not {kind or 'empty'}"
                    )

    def _abort(self, session: GatewaySession, message: scheduler_pb2.AbortRequests) -> None:
        if not set(message.stopped_handles) <= set(message.handles):
            raise InvalidArgument("stopped_handles must all be in handles", field="stopped_handles")
        stopped = set(message.stopped_handles)
        for reason, handles in (
            (FinishReason.ABORT, [handle for handle in message.handles if handle not in stopped]),
            (FinishReason.STOP, [handle for handle in message.handles if handle in stopped]),
        ):
            found = map(session.requests.get, handles)
            if requests := [request for request in found if request is not None]:
                self.engine.changes.abort(requests, reason)

    def _end_turn(self, session: GatewaySession, message: scheduler_pb2.EndTurn) -> None:
        """Records which tool an agent runs after a request that has ended or is about to end."""
        if len(message.tool.encode()) > MAX_TOOL_BYTES:
            raise InvalidArgument(f"tool must have at most {MAX_TOOL_BYTES} bytes", field="tool")
        of = session.requests.get(message.handle) or session.contexts.pop(message.handle, None)
        if of is not None:
            self.engine.changes.end_turn(of, message.tool)

    async def _add(self, session: GatewaySession, message: scheduler_pb2.AddRequest) -> None:
        if message.handle in session.requests:
            raise InvalidArgument(
                f"handle {message.handle} is used by another request of this session",
                field="handle",
            )
        try:
            await self.submitter.submit(session, message)
        except StepwellError as error:
            session.reject(message.handle, error)

    async def _responses(
        self, session: GatewaySession, reader: asyncio.Task[None]
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        """Yields the messages to the gateway. Ends with the gateway's stream, or when this process
        drains and the gateway's last request has ended.
        """
        outbox = session.outbox
        reader.add_done_callback(lambda _: outbox.wake())
        while True:
            if (announced := outbox.take_announced()) is not None:
                yield announced
            elif outbox.has_deltas:
                yield outbox.take_response()
            elif reader.done() or (self.submitter.is_draining and not session.requests):
                return
            else:
                await outbox.wait()
