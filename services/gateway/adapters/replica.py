"""One scheduler as the gateway knows it: a session stream that is opened again for ever."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.channel import open_channel
from services.common.errors import ResourceExhausted, StepwellError
from services.common.queue_state import QueueState
from services.common.queue_state_proto import queue_state_from_proto
from services.gateway.adapters.converters import (
    from_finished,
    from_logprobs_proto,
    from_opened,
    from_rejection,
    to_add_request,
)
from services.gateway.adapters.inflight import Inflight
from services.gateway.core.no_token import NAN_IN_LOGITS, why_no_token
from services.gateway.core.request import ModelLimits

logger = logging.getLogger(__name__)

# What is known of a session before the scheduler says whether it can run steps.
_NOT_SAID = scheduler_pb2.ReplicaState(reason="it has not said yet whether it can run steps")

SessionCall = grpc.aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse]

_MAX_HANDLE = 2**32
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 0.5
_CHECKS_PER_TIMEOUT = 8


@dataclass(frozen=True, slots=True)
class _Add:
    """A sequence to be sent. Its message is made when it is written: those of one request may be
    hundreds, each with the whole prompt."""

    handle: int
    inflight: Inflight

    def message(self) -> scheduler_pb2.SessionRequest:
        """The message."""
        add = to_add_request(self.handle, self.inflight, asyncio.get_running_loop().time())
        return scheduler_pb2.SessionRequest(add=add)


class Replica:
    """A scheduler's address, its session while there is one, and what runs there.

    `on_changed(replica)` is called when a session opens and when the replica becomes able or
    unable to run steps; `on_lost(inflights)` with what ran there when the session ended;
    `on_rejected(inflight, error, replica)` for each request that the scheduler refuses.

    `refusal` is set by the fleet: why this replica gets no requests although it could run them.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        *,
        session_timeout_seconds: float,
        on_changed: Callable[["Replica"], None],
        on_lost: Callable[[list[Inflight]], None],
        on_rejected: Callable[[Inflight, StepwellError, "Replica"], None],
    ) -> None:
        self.address = address
        self.limits: ModelLimits | None = None
        self.model_name = ""
        self.fingerprint = b""
        self.tokenizer_fingerprint = b""
        self.refusal = ""
        self._state = _NOT_SAID
        self._stalled_since: float | None = None
        self._why_away = "not connected yet"
        self._gateway_id = gateway_id
        self._session_timeout = session_timeout_seconds
        self._heard_at = 0.0
        self._on_changed = on_changed
        self._on_lost = on_lost
        self._on_rejected = on_rejected
        self._channel = open_channel(address)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self._running: dict[int, Inflight] = {}
        self._unadmitted: set[int] = set()
        self._queue: QueueState | None = None
        self._num_others_waiting = 0
        self._handles = itertools.count(1)
        self._outbox: list[scheduler_pb2.SessionRequest | _Add] = []
        self._has_mail = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether there is a session."""
        return self.limits is not None

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent now, and steps run."""
        return self.is_connected and self._state.ready and not self.refusal

    @property
    def reason(self) -> str:
        """Why it is not ready; empty when it is."""
        if not self.is_connected:
            return self._why_away
        return self.refusal or self._state.reason

    @property
    def num_unfinished(self) -> int:
        """Sequences of this gateway that run or wait there."""
        return len(self._running)

    def seconds_stalled(self) -> float | None:
        """For how long a connected replica has not been able to run steps; None when it is."""
        if self._stalled_since is None:
            return None
        return asyncio.get_running_loop().time() - self._stalled_since

    def queue_refusal(self, timeout_seconds: float | None) -> ResourceExhausted | None:
        """Why the scheduler would refuse a request with this timeout; None where it may take it.

        The length of the queue is what the scheduler announced last of other gateways' requests,
        and this gateway's own as they are now.
        """
        if self._queue is None:
            return None
        num_waiting = self._num_others_waiting + len(self._unadmitted)
        return replace(self._queue, num_waiting=num_waiting).refusal(timeout_seconds)

    def inflights(self) -> list[Inflight]:
        """Those sequences."""
        return list(self._running.values())

    def send(self, inflight: Inflight) -> None:
        """Sends a sequence there. The replica must be ready."""
        handle = self._free_handle()
        self._running[handle] = inflight
        self._unadmitted.add(handle)
        inflight.sent(release=lambda: self._abort(handle))
        self._post(_Add(handle, inflight))

    def take_back(self) -> list[Inflight]:
        """Aborts all sequences there and returns them, in order of arrival."""
        taken = sorted(self._running.values(), key=lambda inflight: inflight.number)
        for inflight in taken:
            inflight.taken_back()
        return taken

    async def stats(self, timeout_seconds: float) -> scheduler_pb2.GetStatsResponse:
        """Queues, pool and totals. Raises AioRpcError."""
        response: scheduler_pb2.GetStatsResponse = await self._stub.GetStats(
            scheduler_pb2.GetStatsRequest(), timeout=timeout_seconds
        )
        return response

    async def run(self) -> None:
        """Keeps a session open until cancelled."""
        backoff = _FIRST_BACKOFF_SECONDS
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                if await self._session() and loop.time() > began + _MAX_BACKOFF_SECONDS:
                    backoff = _FIRST_BACKOFF_SECONDS
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
        finally:
            await self._channel.close()

    async def _session(self) -> bool:
        """One session from beginning to end; returns whether it ever opened.

        It ends, too, when the scheduler sends nothing for the session's timeout: it hangs.
        """
        opened = False
        call = self._stub.Session()
        self._outbox.clear()
        hello = scheduler_pb2.OpenSession(gateway_id=self._gateway_id)
        self._post(scheduler_pb2.SessionRequest(open=hello))
        writer = asyncio.create_task(self._write(call))
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        try:
            async with asyncio.timeout(None) as alarm:
                watch = asyncio.create_task(self._watch(alarm))
                try:
                    async for response in call:
                        self._heard_at = loop.time()
                        match response.WhichOneof("message"):
                            case "deltas":
                                self._apply(response.deltas)
                            case "state":
                                self._take_state(response.state)
                            case "queue":
                                self._take_queue(queue_state_from_proto(response.queue))
                            case "opened":
                                opened = True
                                self._opened(response.opened)
                finally:
                    watch.cancel()
            self._ended("the scheduler ended the session")
        except TimeoutError:
            self._ended(f"no message for {self._session_timeout:g} s: the scheduler hangs")
        except grpc.aio.AioRpcError as error:
            self._ended(f"{error.code().name}: {error.details()}")
        finally:
            writer.cancel()
            call.cancel()
            self._lost()
        return opened

    async def _watch(self, alarm: asyncio.Timeout) -> None:
        """Fires the alarm when the scheduler was silent for the session's timeout.

        Time in which this process itself stood still is not the scheduler's silence.
        """
        loop = asyncio.get_running_loop()
        interval = self._session_timeout / _CHECKS_PER_TIMEOUT
        while True:
            due = loop.time() + interval
            await asyncio.sleep(interval)
            now = loop.time()
            if now > due + interval:
                self._heard_at = now
            elif now >= self._heard_at + self._session_timeout:
                alarm.reschedule(now)
                return

    async def _write(self, call: SessionCall) -> None:
        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                outbox, self._outbox = self._outbox, []
                for mail in outbox:
                    await call.write(mail.message() if isinstance(mail, _Add) else mail)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # The reader sees the same end of the call, and its reason.

    def _opened(self, opened: scheduler_pb2.SessionOpened) -> None:
        self.limits = from_opened(opened)
        self.model_name = opened.model_name
        self.fingerprint = opened.fingerprint
        self.tokenizer_fingerprint = opened.tokenizer_fingerprint
        logger.info(
            "session with scheduler %s opened: %s, %d tokens",
            self.address,
            opened.model_name,
            opened.max_model_len,
        )
        self._on_changed(self)

    def _take_state(self, state: scheduler_pb2.ReplicaState) -> None:
        before, self._state = self._state, state
        if before == state:
            return
        is_stalled = not state.ready and not state.draining
        if not is_stalled:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = asyncio.get_running_loop().time()
        if not state.ready:
            logger.warning("scheduler %s is not ready: %s", self.address, state.reason)
        elif before is not _NOT_SAID:
            logger.info("scheduler %s is ready again", self.address)
        self._on_changed(self)

    def _take_queue(self, queue: QueueState) -> None:
        self._queue = queue
        self._num_others_waiting = max(0, queue.num_waiting - len(self._unadmitted))

    def _ended(self, reason: str) -> None:
        if self.is_connected:
            logger.warning("session with scheduler %s ended: %s", self.address, reason)
        self._why_away = reason

    def _lost(self) -> None:
        self.limits = None
        self.refusal = ""
        self._state, self._stalled_since = _NOT_SAID, None
        self._queue = None
        self._unadmitted.clear()
        lost, self._running = list(self._running.values()), {}
        self._on_lost(lost)

    def _apply(self, deltas: scheduler_pb2.StepDeltas) -> None:
        running = self._running
        token_ids, start = list(deltas.token_ids), 0
        for admitted in deltas.admitted:
            self._unadmitted.discard(admitted.handle)
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
            self._unadmitted.discard(finished.handle)
            if (inflight := running.pop(finished.handle, None)) is not None:
                _end(inflight, finished, self.limits)
        for rejected in deltas.rejected:
            self._unadmitted.discard(rejected.handle)
            if (inflight := running.pop(rejected.handle, None)) is not None:
                self._on_rejected(inflight, from_rejection(rejected), self)

    def _abort(self, handle: int) -> None:
        if self._running.pop(handle, None) is None:
            return
        self._unadmitted.discard(handle)
        last = self._outbox[-1] if self._outbox else None
        if isinstance(last, scheduler_pb2.SessionRequest) and last.WhichOneof("message") == "abort":
            last.abort.handles.append(handle)
        else:
            abort = scheduler_pb2.AbortRequests(handles=[handle])
            self._post(scheduler_pb2.SessionRequest(abort=abort))

    def _post(self, mail: "scheduler_pb2.SessionRequest | _Add") -> None:
        self._outbox.append(mail)
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


def _end(inflight: Inflight, finished: scheduler_pb2.Finished, limits: ModelLimits | None) -> None:
    end = from_finished(finished)
    if isinstance(end, StepwellError):
        if limits is not None and end.error_reason == NAN_IN_LOGITS:
            output, vocab_size = inflight.output_token_ids, limits.vocab_size
            end = why_no_token(inflight.request, output, vocab_size) or end
        inflight.failed(end)
    else:
        inflight.finished(end)
