"""Serves the gRPC method GenerateSession. Each call is one client's session, and each turn of the
session is a separate request.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from stepwell.gateway.v1 import gateway_pb2

from services.common.errors import InvalidArgument, StepwellError
from services.common.rpc.server import Context
from services.common.telemetry import names
from services.gateway.adapters.access import CALLER
from services.gateway.adapters.grpc.generate_requests import (
    ID_PREFIX,
    GenerateRequests,
    to_response,
)
from services.gateway.adapters.grpc.inference_servicer import METHOD_PREFIX, deadline_of_call
from services.gateway.core.traces.timeline import Part
from services.gateway.options.option import CallParts, Options
from services.gateway.options.sessions.core.client_session import ClientSession
from services.gateway.options.sessions.core.client_sessions import ClientSessions
from services.gateway.options.sessions.core.turn import turn_of

GENERATE_SESSION = "GenerateSession"


class SessionCalls:
    """Serves calls of GenerateSession. Each turn is answered before the next turn is read."""

    def __init__(self, sessions: ClientSessions, options: Options, parts: CallParts) -> None:
        self._sessions = sessions
        self._options = options
        self._parts = parts
        self._requests = GenerateRequests(parts.inference)

    async def serve(
        self, messages: AsyncIterator[gateway_pb2.GenerateSessionRequest], context: Context
    ) -> None:
        """Serves one call, which is a session, until the client ends its stream."""
        metadata = context.invocation_metadata() or ()
        header = self._options.header_in({name for name, _ in metadata})
        if header is not None:
            raise InvalidArgument(f"{header} cannot be given with a session", field=header)
        self._parts.gate.check()
        ended: asyncio.Future[StepwellError] = asyncio.get_running_loop().create_future()
        session = self._sessions.open(CALLER.get(), ended.set_result)
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
        parts, caller = self._parts, session.caller
        method = f"{METHOD_PREFIX}{GENERATE_SESSION}"
        with parts.records.recording(method, operation, context, in_trailer=False) as record:
            with parts.observer.counting_refusals(record, caller):
                parts.inference.check_model(request.model, caller)
            async with AsyncExitStack() as work:
                await work.enter_async_context(self._options.admitted(record))
                observing = parts.observer.observing(operation, record, caller)
                observation = work.enter_context(observing)
                work.enter_context(parts.gate.enter())
                deadline = deadline_of_call(context)
                arrival = work.enter_context(
                    parts.inference.arriving(caller, deadline, needs_room=session.held is None)
                )
                await parts.inference.until_limits(record.wait)
                record.enter(Part.TOKENIZE)
                if is_chat and session.token_ids:
                    raise InvalidArgument(
                        "chat can only begin a session: its template begins a conversation",
                        field="chat",
                    )
                asked = await self._requests.client_request(
                    request, record, is_continuation=bool(session.token_ids)
                )
                record.enter(Part.PREPARE)
                number = session.num_turns
                generation = await parts.inference.prepare(
                    turn_of(session, asked), record.trace_headers, deadline
                )
                generation = await self._options.before_queue(generation, record, ID_PREFIX)
                record.enter(Part.PREPARE)
                timed = record if request.include_metrics else None
                await parts.streams.send(
                    generation,
                    lambda piece: gateway_pb2.GenerateSessionResponse(
                        turn=number, piece=to_response(piece, generation, timed)
                    ),
                    context,
                    record,
                    observation,
                    arrival,
                    work,
                )


async def _next(
    messages: AsyncIterator[gateway_pb2.GenerateSessionRequest],
    ended: asyncio.Future[StepwellError],
) -> gateway_pb2.GenerateSessionRequest | None:
    """Returns the next message, or None at the end of the client's stream. If the session ends
    before the next message arrives, raises the error that ended the session.
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
