"""Serves GenerateSession. Each call is one session, and each turn of the session is a separate
request.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
from stepwell.gateway.v1 import gateway_pb2

from services.common.errors import InvalidArgument, StepwellError
from services.common.telemetry import names
from services.gateway.adapters.grpc.call_records import CallRecords
from services.gateway.adapters.grpc.generate_requests import GenerateRequests, to_response
from services.gateway.adapters.grpc.message_stream import AnswerStreams
from services.gateway.adapters.keys.auth import CALL_TENANT
from services.gateway.adapters.telemetry.observation import Observer
from services.gateway.adapters.telemetry.request_record import RequestRecord
from services.gateway.core.gate import Gate
from services.gateway.core.limits.tenant_limits import TenantLimits, was_refused
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Generation
from services.gateway.core.request.inference import Inference
from services.gateway.core.traces.timeline import Part
from services.gateway.options.option import Options
from services.gateway.options.sessions.core.client_session import ClientSession
from services.gateway.options.sessions.core.client_sessions import ClientSessions

GENERATE_SESSION = "/stepwell.gateway.v1.Inference/GenerateSession"
STREAM_TYPES = {GENERATE_SESSION: gateway_pb2.GenerateSessionRequest}
"""Maps the full names of the methods with request streams to their message types."""

Context = grpc.aio.ServicerContext[Any, Any]


class SessionCalls:
    """Serves session calls. Each turn is answered before the next one is read."""

    def __init__(
        self,
        inference: Inference,
        sessions: ClientSessions,
        gate: Gate,
        observer: Observer,
        records: CallRecords,
        limits: TenantLimits,
        streams: AnswerStreams,
        options: Options,
    ) -> None:
        self._inference = inference
        self._requests = GenerateRequests(inference)
        self._sessions = sessions
        self._gate = gate
        self._observer = observer
        self._records = records
        self._limits = limits
        self._streams = streams
        self._options = options

    async def serve(
        self, messages: AsyncIterator[gateway_pb2.GenerateSessionRequest], context: Context
    ) -> None:
        """Serves one call from its first turn to the end of its stream."""
        metadata = context.invocation_metadata() or ()
        header = self._options.header_in({name for name, _ in metadata})
        if header is not None:
            raise InvalidArgument(f"{header} cannot be given with a session", field=header)
        self._gate.check()
        ended: asyncio.Future[StepwellError] = asyncio.get_running_loop().create_future()
        session = self._sessions.open(CALL_TENANT.get(), ended.set_result)
        try:
            while (message := await _next(messages, ended)) is not None:
                await self._turn(session, message.turn, context)
        finally:
            self._sessions.end(session)
            ended.cancel()

    async def _turn(
        self, session: ClientSession, request: gateway_pb2.GenerateRequest, context: Context
    ) -> None:
        is_chat = request.WhichOneof("prompt") == "chat"
        operation = names.GENAI_OPERATION_CHAT if is_chat else names.GENAI_OPERATION_TEXT_COMPLETION
        tenant = session.tenant
        with self._records.recording(
            GENERATE_SESSION, operation, context, in_trailer=False
        ) as record:
            with self._observer.counting_refusals(record, tenant):
                self._inference.check_model(request.model, tenant)
                allowance = await self._limits.admit(tenant)
            refused = False
            try:
                async with AsyncExitStack() as work:
                    observing = self._observer.observing(operation, record, tenant)
                    observation = work.enter_context(observing)
                    work.enter_context(self._gate.enter())
                    deadline = deadline_of_call(context)
                    arrival = work.enter_context(
                        self._inference.arriving(tenant, deadline, needs_room=session.held is None)
                    )
                    record.enter(Part.TOKENIZE)
                    asked = await self._requests.client_request(request, record, session)
                    record.enter(Part.PREPARE)
                    generation = await self._inference.prepare(
                        asked, record.trace_headers, deadline
                    )
                    await allowance.reserve(generation)
                    await self._streams.send(
                        generation,
                        lambda piece: _message(
                            piece, generation, record if request.include_metrics else None
                        ),
                        context,
                        record,
                        observation,
                        arrival,
                        work,
                    )
            except StepwellError as error:
                refused = was_refused(error)
                raise
            finally:
                allowance.close(was_refused=refused)


def _message(
    piece: Piece, generation: Generation, timed: RequestRecord | None
) -> gateway_pb2.GenerateSessionResponse:
    message = to_response(piece, generation, timed)
    return gateway_pb2.GenerateSessionResponse(turn=generation.request.turn, piece=message)


async def _next(
    messages: AsyncIterator[gateway_pb2.GenerateSessionRequest],
    ended: asyncio.Future[StepwellError],
) -> gateway_pb2.GenerateSessionRequest | None:
    """Returns the next message, or None at the end of the client's stream. If the session ends
    meanwhile, raises the error that ended it.
    """
    reading = asyncio.ensure_future(anext(messages, None))
    try:
        await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not reading.done():
            reading.cancel()
    if ended.done():
        raise ended.result()
    return reading.result()


def deadline_of_call(context: Context) -> float | None:
    """Returns the call's deadline on the event loop's clock. Returns None if the call has no
    deadline.
    """
    remaining = context.time_remaining()
    return None if remaining is None else asyncio.get_running_loop().time() + remaining
