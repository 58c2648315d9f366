"""One scheduler as the gateway knows it: a session stream that is opened again for ever."""

import asyncio
import itertools
import logging
from collections.abc import Callable

import grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.channel import open_channel
from services.common.errors import StepwellError
from services.gateway.adapters.converters import (
    from_finished,
    from_logprobs_proto,
    from_opened,
    from_rejection,
    to_add_request,
)
from services.gateway.adapters.inflight import Inflight
from services.gateway.core.request import ModelLimits

logger = logging.getLogger(__name__)

SessionCall = grpc.aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse]

_MAX_HANDLE = 2**32
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 1.0


class Replica:
    """A scheduler's address, its session while there is one, and what runs there.

    `on_ready(replica)` is called when a session opens, `on_lost(inflights)` with whatever ran when
    it broke, `on_rejected(inflight, error, replica)` for each refusal at its door.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        *,
        on_ready: Callable[["Replica"], None],
        on_lost: Callable[[list[Inflight]], None],
        on_rejected: Callable[[Inflight, StepwellError, "Replica"], None],
    ) -> None:
        self.address = address
        self.limits: ModelLimits | None = None
        self.model_name = ""
        self.reason = "not connected yet"
        self._gateway_id = gateway_id
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_rejected = on_rejected
        self._channel = open_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._running: dict[int, Inflight] = {}
        self._handles = itertools.count(1)
        self._outbox: list[scheduler_pb2.SessionRequest] = []
        self._has_mail = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent now."""
        return self.limits is not None

    @property
    def num_unfinished(self) -> int:
        """Sequences of this gateway that run or wait there."""
        return len(self._running)

    def inflights(self) -> list[Inflight]:
        """Those sequences."""
        return list(self._running.values())

    def send(self, inflight: Inflight) -> None:
        """Sends a sequence there. The replica must be ready."""
        handle = self._free_handle()
        self._running[handle] = inflight
        inflight.sent(release=lambda: self._abort(handle))
        self._post(scheduler_pb2.SessionRequest(add=to_add_request(handle, inflight)))

    async def stats(self, timeout_seconds: float) -> scheduler_pb2.GetStatsResponse:
        """Queues, pool and totals. Raises AioRpcError."""
        response: scheduler_pb2.GetStatsResponse = await self._stub.GetStats(
            scheduler_pb2.GetStatsRequest(), timeout=timeout_seconds
        )
        return response

    async def run(self) -> None:
        """Keeps a session open until cancelled."""
        backoff = _FIRST_BACKOFF_SECONDS
        try:
            while True:
                if await self._session():
                    backoff = _FIRST_BACKOFF_SECONDS
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
        finally:
            await self._channel.close()

    async def _session(self) -> bool:
        """One session from beginning to end; returns whether it ever opened."""
        opened = False
        call = self._stub.Session()
        self._outbox.clear()
        hello = scheduler_pb2.OpenSession(gateway_id=self._gateway_id)
        self._post(scheduler_pb2.SessionRequest(open=hello))
        writer = asyncio.create_task(self._write(call))
        try:
            async for response in call:
                match response.WhichOneof("message"):
                    case "deltas":
                        self._apply(response.deltas)
                    case "opened":
                        opened = True
                        self._opened(response.opened)
            self._ended("the scheduler ended the session")
        except grpc.aio.AioRpcError as error:
            self._ended(f"{error.code().name}: {error.details()}")
        finally:
            writer.cancel()
            call.cancel()
            self._lost()
        return opened

    async def _write(self, call: SessionCall) -> None:
        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                outbox, self._outbox = self._outbox, []
                for message in outbox:
                    await call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # The reader sees the same end of the call, and its reason.

    def _opened(self, opened: scheduler_pb2.SessionOpened) -> None:
        self.limits = from_opened(opened)
        self.model_name = opened.model_name
        self.reason = ""
        logger.info(
            "session with scheduler %s opened: %s, %d tokens",
            self.address,
            opened.model_name,
            opened.max_model_len,
        )
        self._on_ready(self)

    def _ended(self, reason: str) -> None:
        if self.is_ready:
            logger.warning("session with scheduler %s ended: %s", self.address, reason)
        self.reason = reason

    def _lost(self) -> None:
        self.limits = None
        lost, self._running = list(self._running.values()), {}
        self._on_lost(lost)

    def _apply(self, deltas: scheduler_pb2.StepDeltas) -> None:
        running = self._running
        token_ids, start = list(deltas.token_ids), 0
        for admitted in deltas.admitted:
            if (inflight := running.get(admitted.handle)) is not None:
                inflight.admitted(admitted.num_cached_tokens)
        for handle, num_tokens in zip(deltas.handles, deltas.num_tokens, strict=True):
            if (inflight := running.get(handle)) is not None:
                inflight.tokens(token_ids[start : start + num_tokens])
            start += num_tokens
        for message in deltas.logprobs:
            if (inflight := running.get(message.handle)) is not None:
                _add_logprobs(inflight, message)
        for finished in deltas.finished:
            if (inflight := running.pop(finished.handle, None)) is not None:
                _end(inflight, finished)
        for rejected in deltas.rejected:
            if (inflight := running.pop(rejected.handle, None)) is not None:
                self._on_rejected(inflight, from_rejection(rejected), self)

    def _abort(self, handle: int) -> None:
        if self._running.pop(handle, None) is None:
            return
        last = self._outbox[-1] if self._outbox else None
        if last is not None and last.WhichOneof("message") == "abort":
            last.abort.handles.append(handle)
        else:
            abort = scheduler_pb2.AbortRequests(handles=[handle])
            self._post(scheduler_pb2.SessionRequest(abort=abort))

    def _post(self, message: scheduler_pb2.SessionRequest) -> None:
        self._outbox.append(message)
        self._has_mail.set()

    def _free_handle(self) -> int:
        while (handle := next(self._handles) % _MAX_HANDLE) in self._running:
            pass
        return handle


def _add_logprobs(inflight: Inflight, message: scheduler_pb2.RequestLogprobs) -> None:
    if len(message.sampled.ranks):
        inflight.logprobs(from_logprobs_proto(message.sampled))
    if len(message.prompt.ranks):
        inflight.prompt_logprobs(from_logprobs_proto(message.prompt))


def _end(inflight: Inflight, finished: scheduler_pb2.Finished) -> None:
    end = from_finished(finished)
    if isinstance(end, StepwellError):
        inflight.failed(end)
    else:
        inflight.finished(end)
