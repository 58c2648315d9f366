"""The scheduler's contract over an engine."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import InvalidArgument, StepwellError
from services.scheduler.adapters.sessions import GatewaySession, Sessions
from services.scheduler.adapters.statistics import Statistics
from services.scheduler.adapters.submitter import RequestSubmitter
from services.scheduler.core.engine_core import EngineCore

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServicer):
    """Sessions in front of one engine. `opened` is the first message of each session."""

    def __init__(
        self,
        engine: EngineCore,
        submitter: RequestSubmitter,
        sessions: Sessions,
        statistics: Statistics,
        opened: scheduler_pb2.SessionOpened,
    ) -> None:
        self._engine = engine
        self._submitter = submitter
        self._sessions = sessions
        self._statistics = statistics
        self._opened = opened

    async def Session(
        self, request_iterator: AsyncIterator[scheduler_pb2.SessionRequest], context: _Context
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        """See the contract."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidArgument("a session begins with open", field="open")
        session = self._sessions.open(first.open.gateway_id)
        reader = asyncio.create_task(self._read(session, request_iterator))
        logger.info("session of %s opened", session.gateway_id)
        try:
            yield scheduler_pb2.SessionResponse(opened=self._opened)
            yield scheduler_pb2.SessionResponse(state=self._sessions.state)
            async for response in self._responses(session, reader):
                yield response
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            aborted = self._sessions.close(session)
            self._engine.abort(aborted)
            logger.info(
                "session of %s ended; %d requests aborted", session.gateway_id, len(aborted)
            )

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: _Context
    ) -> scheduler_pb2.AbortResponse:
        """See the contract."""
        found = self._sessions.find(request.request_ids)
        self._engine.abort(found)
        return scheduler_pb2.AbortResponse(num_aborted=len(found))

    async def Pause(
        self, request: scheduler_pb2.PauseRequest, context: _Context
    ) -> scheduler_pb2.PauseResponse:
        """See the contract."""
        await self._engine.pause(abort=request.abort)
        return scheduler_pb2.PauseResponse()

    async def Resume(
        self, request: scheduler_pb2.ResumeRequest, context: _Context
    ) -> scheduler_pb2.ResumeResponse:
        """See the contract."""
        self._engine.resume()
        return scheduler_pb2.ResumeResponse()

    async def ResetPrefixCache(
        self, request: scheduler_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> scheduler_pb2.ResetPrefixCacheResponse:
        """See the contract."""
        await self._engine.reset_prefix_cache(preempt_running=request.preempt_running)
        return scheduler_pb2.ResetPrefixCacheResponse()

    async def GetStats(
        self, request: scheduler_pb2.GetStatsRequest, context: _Context
    ) -> scheduler_pb2.GetStatsResponse:
        """See the contract."""
        return self._statistics.message()

    async def _read(
        self, session: GatewaySession, messages: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "add":
                    await self._add(session, message.add)
                case "abort":
                    found = map(session.requests.get, message.abort.handles)
                    self._engine.abort([request for request in found if request is not None])
                case kind:
                    raise InvalidArgument(
                        f"an open session takes add and abort, not {kind or 'an empty message'}"
                    )

    async def _add(self, session: GatewaySession, message: scheduler_pb2.AddRequest) -> None:
        try:
            await self._submitter.submit(session, message)
        except StepwellError as error:
            session.reject(message.handle, error)

    async def _responses(
        self, session: GatewaySession, reader: asyncio.Task[None]
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        """What the outbox collects, until the gateway ends its stream or the drain is done."""
        outbox = session.outbox
        reader.add_done_callback(lambda _: outbox.wake())
        while True:
            if (announced := outbox.take_announced()) is not None:
                yield announced
            elif outbox.has_deltas:
                yield scheduler_pb2.SessionResponse(deltas=outbox.take())
            elif reader.done() or (self._submitter.is_draining and not session.requests):
                return
            else:
                await outbox.wait()
