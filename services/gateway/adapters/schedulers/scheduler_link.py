"""The session with one scheduler: a bidirectional stream of requests and their results."""

import asyncio
import logging
from collections.abc import Mapping

import grpc
from stepwell.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

from services.common.errors import InternalError
from services.common.process.watchdog.proc import watch_addresses
from services.common.process.watchdog.silence import Silence
from services.common.replica.messages import queue_state_from_proto, replica_load_from_proto
from services.common.rpc.channel import open_channel
from services.common.rpc.local_call import for_each
from services.common.rpc.protocol import OtherProtocol, own_release, require_same_protocol
from services.common.rpc.status import from_peer
from services.common.telemetry.metrics_servicer import collect_from
from services.common.telemetry.trace_headers import TraceHeaders
from services.common.tls.credentials import Tls
from services.gateway.adapters.schedulers.converters import (
    chunk_to_proto,
    description_from_proto,
    replica_state_from_proto,
)
from services.gateway.adapters.schedulers.scheduler_admin import SchedulerAdmin
from services.gateway.adapters.schedulers.session import reports
from services.gateway.adapters.schedulers.session.deltas import SessionDeltas
from services.gateway.adapters.schedulers.session.mail import Mail, messages_of
from services.gateway.adapters.schedulers.session.numbering import Numbering
from services.gateway.adapters.schedulers.session.wrong_message import WrongMessage, require
from services.gateway.core.fleet.replica import ENDED_HERE, Replica
from services.gateway.core.request.inflight import Inflight

SessionCall = grpc.aio.StreamStreamCall[scheduler_pb2.SessionRequest, scheduler_pb2.SessionResponse]

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS = 0.05
_MAX_REST_SECONDS = 2.0
_MAX_BACKOFF_SECONDS = 0.5
_MAX_AWAY_BACKOFF_SECONDS = 5.0
_CHECKS_PER_TIMEOUT = 8
_MOST_TIMEOUTS = 2
_UNREAD_BYTES = 512
"""Number of bytes that gRPC may receive before the gateway reads them. It is small (the tokens of a
few steps), so that later results stay at the scheduler, which merges them into one message.
"""
_LAST_CALLS_SECONDS = 1.0
"""Seconds for which other calls, such as GetStats, may continue after the session was closed."""


class SchedulerLink:
    """Implements the core's Link over gRPC. When the session ends, a new one is opened, after
    delays that grow with each failed attempt.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        session_timeout_seconds: float,
        tls: Tls | None = None,
    ) -> None:
        """If no message arrives for `session_timeout_seconds`, the scheduler is considered to hang,
        and the session ends.
        """
        self.address = address
        self.was_opened = False
        """Whether the scheduler has ever opened a session."""
        self._gateway_id = gateway_id
        self._session_timeout = session_timeout_seconds
        self._received_at = 0.0
        self._num_timeouts = 0
        self._numbering = Numbering()
        self._deltas: SessionDeltas | None = None
        """Processes the results of the session's sequences. None before the session is open."""
        self._wrong_at = 0.0
        self._rest_seconds = _FIRST_BACKOFF_SECONDS
        self._refused_with = ""
        """The last logged warning about a session that did not open."""
        self._channel = open_channel(address, tls, lookahead_bytes=_UNREAD_BYTES)
        self._stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self.admin = SchedulerAdmin(address, self._channel)
        # The outbox has sequences and not their messages, because a request may have hundreds of
        # sequences, and each message contains the whole prompt.
        self._outbox: list[Mail] = []
        self._has_mail = asyncio.Event()

    def add(self, handle: int, inflight: Inflight) -> None:
        self._note_sent(handle, inflight)
        self._post((handle, inflight))

    def add_chunk(self, handle: int, inflight: Inflight, num_tokens: int) -> None:
        self._note_sent(handle, inflight)
        chunk = chunk_to_proto(handle, inflight, num_tokens)
        self._post(scheduler_pb2.SessionRequest(chunk=chunk))

    def abort(self, handle: int, *, was_stopped: bool = False) -> None:
        if self._deltas is not None:
            now = asyncio.get_running_loop().time()
            self._deltas.aborted(handle, now, was_stopped=was_stopped)
        last = self._outbox[-1] if self._outbox else None
        if isinstance(last, scheduler_pb2.SessionRequest) and last.WhichOneof("message") == "abort":
            message = last
        else:
            message = scheduler_pb2.SessionRequest(abort=scheduler_pb2.AbortRequests())
            self._post(message)
        message.abort.handles.append(handle)
        if was_stopped:
            message.abort.stopped_handles.append(handle)

    def end_turn(self, handle: int, tool: str) -> None:
        end_turn = scheduler_pb2.EndTurn(handle=handle, tool=tool)
        self._post(scheduler_pb2.SessionRequest(end_turn=end_turn))

    def keep_trace(self, request_id: str, trace: TraceHeaders) -> None:
        """Asks the scheduler to export its spans of a sequence, as children of the span in `trace`,
        although the request was not sampled.
        """
        keep = scheduler_pb2.KeepTrace(
            request_id=request_id, traceparent=trace.traceparent, tracestate=trace.tracestate
        )
        self._post(scheduler_pb2.SessionRequest(keep=keep))

    async def stats(self, timeout_seconds: float) -> scheduler_pb2.GetStatsResponse:
        """Queries the scheduler's statistics. Raises AioRpcError if the call fails."""
        response: scheduler_pb2.GetStatsResponse = await self._stub.GetStats(
            scheduler_pb2.GetStatsRequest(), timeout=timeout_seconds
        )
        return response

    async def metrics(self, labels: Mapping[str, str], *, exemplars: bool) -> bytes | None:
        """Queries the replica's metrics, and adds `labels` to each series. Returns None if the
        metrics do not arrive in time.
        """
        return await collect_from(self._channel, labels, exemplars=exemplars)

    async def activity(
        self, request: scheduler_pb2.GetActivityRequest, timeout_seconds: float
    ) -> scheduler_pb2.GetActivityResponse:
        """Queries the activity of requests, steps and blocks. Raises AioRpcError if that fails."""
        response: scheduler_pb2.GetActivityResponse = await self._stub.GetActivity(
            request, timeout=timeout_seconds
        )
        return response

    async def running_spans(
        self, request: scheduler_pb2.GetRunningSpansRequest, timeout_seconds: float
    ) -> scheduler_pb2.GetRunningSpansResponse:
        """Queries the spans of unfinished requests so far. Raises AioRpcError if the call fails."""
        response: scheduler_pb2.GetRunningSpansResponse = await self._stub.GetRunningSpans(
            request, timeout=timeout_seconds
        )
        return response

    async def run(self, replica: Replica) -> None:
        """Keeps a session open until cancelled. Forwards received messages to `replica`."""
        backoff = _FIRST_BACKOFF_SECONDS
        loop = asyncio.get_running_loop()
        away_since = loop.time()
        try:
            while True:
                began = loop.time()
                if await self._session(replica):
                    away_since = loop.time()
                    if away_since > began + _MAX_BACKOFF_SECONDS:
                        backoff = _FIRST_BACKOFF_SECONDS
                if backoff > _MAX_BACKOFF_SECONDS:
                    self._channel.renew()
                await asyncio.sleep(max(backoff, self._rest(began)))
                backoff = min(2 * backoff, longest_backoff(loop.time() - away_since))
        finally:
            await self._channel.close(_LAST_CALLS_SECONDS)

    def _rest(self, began: float) -> float:
        """Returns the seconds to wait before the next session. `began` is the start of the last
        session. The wait is 0 unless an invalid message of the scheduler ended that session. It
        then grows with repetitions, so that most requests are sent to other schedulers.
        """
        if self._wrong_at < began:
            self._rest_seconds = max(self._rest_seconds / 2, _FIRST_BACKOFF_SECONDS)
            return 0.0
        seconds, longest = self._rest_seconds, _MAX_REST_SECONDS
        self._rest_seconds = min(4 * seconds, longest)
        return seconds

    async def _session(self, replica: Replica) -> bool:
        """Runs one session until it ends. Returns whether the scheduler opened it."""
        call, loop = self._stub.Session(), asyncio.get_running_loop()
        self._outbox.clear()
        self._numbering, self._deltas = Numbering(), None
        hello = scheduler_pb2.OpenSession(gateway_id=self._gateway_id, release=own_release())
        self._post(scheduler_pb2.SessionRequest(open=hello))
        writer = asyncio.create_task(self._write(call, replica))
        reason, is_late = ENDED_HERE, False
        try:
            await self._read(call, replica)
            reason = "the scheduler ended the session"
        except TimeoutError:
            is_late = True
            seconds = f"within {self._session_timeout:g} s and hangs"
            is_silent = loop.time() >= self._received_at + self._session_timeout
            verb = "sent" if is_silent else "acknowledged"
            reason = f"the scheduler {verb} no message {seconds}"
        except WrongMessage as error:
            reason = f"a message of the scheduler is wrong: {error}"
            self._note_wrong(replica, reason)
        except OtherProtocol as error:
            reason = error.message
            self._warn_once(reason)
        except grpc.aio.AioRpcError as error:
            refusal = from_peer("the scheduler", error)
            reason = refusal.message
            if refusal.error_reason == OtherProtocol.reason:
                self._warn_once(reason)
        except Exception as error:
            reason = f"a message of the scheduler cannot be processed: {type(error).__name__}"
            logger.exception("a message of scheduler %s cannot be processed", self.address)
            self._note_wrong(replica, reason)
        finally:
            writer.cancel()
            call.cancel()
            self._count_timeout(is_late=is_late)
            was_open = replica.is_connected
            replica.closed(reason)
        return was_open

    def _note_wrong(self, replica: Replica, reason: str) -> None:
        self._wrong_at = asyncio.get_running_loop().time()
        if not replica.is_connected:
            self._warn_once(reason)

    def _warn_once(self, reason: str) -> None:
        if reason != self._refused_with:
            logger.warning("no session with scheduler %s can be opened: %s", self.address, reason)
            self._refused_with = reason

    def _note_sent(self, handle: int, inflight: Inflight) -> None:
        if self._deltas is not None:
            self._deltas.sent(handle, inflight)

    def _count_timeout(self, *, is_late: bool) -> None:
        """Counts consecutive timeouts of sessions. After _MOST_TIMEOUTS, makes a new channel."""
        self._num_timeouts = self._num_timeouts + 1 if is_late else 0
        if self._num_timeouts == _MOST_TIMEOUTS:
            self._num_timeouts = 0
            self._channel.renew()

    async def _read(self, call: SessionCall, replica: Replica) -> None:
        """Processes messages until the scheduler ends the stream. Raises TimeoutError when the
        scheduler has been silent (see `_heard_at`) for the session's timeout.
        """
        loop = asyncio.get_running_loop()
        self._received_at = loop.time()

        def take(response: scheduler_pb2.SessionResponse) -> None:
            self._received_at = loop.time()
            self._numbering.check(response, self._received_at)
            self._take(response, replica)

        async with asyncio.timeout(None) as alarm:
            watch = asyncio.create_task(self._watch(alarm, replica))
            try:
                await for_each(call, take)
            finally:
                watch.cancel()

    def _open(self, response: scheduler_pb2.SessionResponse, replica: Replica) -> None:
        require(
            response.WhichOneof("message") == "opened",
            "the first message of a session is not `opened`",
        )
        require_same_protocol("the scheduler", response.opened.release, "gateway")
        reports.check_opened(response.opened)
        description = description_from_proto(response.opened)
        self._deltas = SessionDeltas(replica, description.limits)
        replica.opened(description)
        self.was_opened = True

    def _take(self, response: scheduler_pb2.SessionResponse, replica: Replica) -> None:
        if self._deltas is None:
            self._open(response, replica)
            return
        match response.WhichOneof("message"):
            case "deltas":
                self._deltas.take(response.deltas)
            case "state":
                replica.state_changed(replica_state_from_proto(response.state))
            case "queue":
                reports.check_queue(response.queue)
                replica.queue_changed(queue_state_from_proto(response.queue))
            case "load":
                reports.check_load(response.load)
                replica.load_changed(replica_load_from_proto(response.load))
            case kind:
                raise WrongMessage(
                    f"{kind or 'an empty message'} is not allowed in an open session"
                )

    @property
    def _heard_at(self) -> float:
        """Returns the time since which the scheduler has been silent: when the last message was
        received, or, if it is earlier, since when sent messages have been unacknowledged.
        """
        if not self._numbering.has_untaken:
            return self._received_at
        return min(self._received_at, self._numbering.untaken_since)

    async def _watch(self, alarm: asyncio.Timeout, replica: Replica) -> None:
        """Makes `alarm` expire when the scheduler has been silent (see `_heard_at`) for the
        session's timeout. `Silence` measures the second half of the timeout, because it does not
        count delays of this process. Also repeats aborts to which the scheduler has not replied,
        unless the replica cannot run steps.
        """
        loop, silence = asyncio.get_running_loop(), None
        interval, heard_at = self._session_timeout / _CHECKS_PER_TIMEOUT, self._heard_at
        read = watch_addresses(lambda: (self.address,))
        while True:
            await asyncio.sleep(interval)
            now = loop.time()
            if replica.seconds_stalled() is None:
                self._abort_again(now - self._session_timeout)
            if self._heard_at != heard_at:
                silence, heard_at = None, self._heard_at
            if now < heard_at + self._session_timeout / 2:
                continue
            if silence is None:
                silence = Silence(
                    heard_at,
                    longest_first_seconds=self._session_timeout / 2 + 2 * interval,
                    longest_turn_seconds=2 * interval,
                )
            if silence.look(read(now)) >= self._session_timeout:
                alarm.reschedule(now)
                return

    def _abort_again(self, latest: float) -> None:
        """Repeats aborts that were sent at `latest` or earlier and to which the scheduler has not
        replied. Without repetition, if the abort of a client's session between two turns was lost,
        the replica would keep the session's KV blocks for ever. The scheduler ignores aborts of
        ended requests.
        """
        late = self._deltas.unanswered_aborts(latest) if self._deltas is not None else {}
        for handle, was_stopped in late.items():
            self.abort(handle, was_stopped=was_stopped)
        if late:
            logger.warning(
                "scheduler %s has not ended %d requests that were aborted %g s ago: they are "
                "aborted again",
                *(self.address, len(late), self._session_timeout),
            )

    async def _write(self, call: SessionCall, replica: Replica) -> None:
        loop = asyncio.get_running_loop()

        def failed(handle: int) -> None:
            if self._deltas is not None:
                self._deltas.unsent(handle)
            replica.finished(handle, InternalError("the request cannot be sent to a replica"))

        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                outbox, self._outbox = self._outbox, []
                for message in messages_of(outbox, failed):
                    self._numbering.number(message, loop.time())
                    await call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            return  # `_read` handles the end of the call.

    def _post(self, mail: Mail) -> None:
        self._outbox.append(mail)
        self._has_mail.set()


def longest_backoff(away_seconds: float) -> float:
    """Returns the longest delay in seconds between two attempts to open a session, after no session
    was open for `away_seconds`: a tenth of `away_seconds`, within bounds. Attempts become rarer
    because each costs a millisecond of processor time, and a registry may list many dead
    schedulers.
    """
    return min(max(_MAX_BACKOFF_SECONDS, away_seconds / 10), _MAX_AWAY_BACKOFF_SECONDS)
