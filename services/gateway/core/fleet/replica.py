"""A replica as this gateway knows it: its scheduler's description and state, and the sequences (the
prompt and one answer of a request) that this gateway has sent to it.
"""

import itertools
import logging
from functools import partial
from typing import Protocol

from services.common.errors import ResourceExhausted, StepwellError
from services.common.replica.load import ReplicaLoad
from services.common.replica.queue_state import QueueState
from services.common.request.finish import Finish
from services.gateway.core.fleet.link import Link
from services.gateway.core.fleet.load_tracker import LoadTracker
from services.gateway.core.fleet.recent_prefixes import RecentPrefixes
from services.gateway.core.fleet.replica_description import ReplicaDescription, ReplicaState
from services.gateway.core.ports import Clock
from services.gateway.core.request.inflight import Inflight
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.no_token import (
    NAN_IN_LOGITS,
    NO_CONFORMING_TOKEN,
    nothing_conforms,
    why_no_token,
)
from services.gateway.core.request.request import HeldSequence, Turn
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from services.gateway.core.traces.sequence_trace import ResubmitCause

logger = logging.getLogger(__name__)

ENDED_HERE = "this gateway ended the session"
"""The reason passed to `Replica.closed` if this gateway ended the session without an error."""

_MAX_HANDLE = 2**32
_UNKNOWN = ReplicaState(
    ready=False, reason="the scheduler has not reported yet whether it can run steps"
)


class Replica:
    """A replica's scheduler, and the sequences that this gateway has sent to it through a Link, the
    connection to the scheduler. When the scheduler's messages arrive, the link calls `turn_ended`
    and the methods from `opened` to `closed`.

    An integer, called a handle, identifies a sequence. Handles are unique within one session, which
    is a gRPC stream between this gateway and the scheduler. Clients' sessions are different: each
    is a series of requests (turns), which continue one sequence.
    """

    def __init__(self, address: str, link: Link, clock: Clock, listener: "ReplicaListener") -> None:
        self.address = address
        self.is_connected = False
        self.description: ReplicaDescription | None = None
        """The description that the scheduler sent at the start of the last session."""
        self.refusal = ""
        """Why no requests are sent to the replica even if it can run steps, for example because it
        serves another model. Empty if requests may be sent. Set by ServedModel.
        """
        self.is_draining = False
        """Whether the scheduler has announced that it accepts no more requests."""
        self.running: dict[int, Inflight] = {}
        self.load = LoadTracker()
        self.recent_prefixes = RecentPrefixes()
        self._link = link
        self._clock = clock
        self._listener = listener
        self._state = _UNKNOWN
        self._stalled_since: float | None = None
        self._why_disconnected = "not connected yet"
        self._disconnected_since = clock.time()
        self._handles = itertools.count(1)
        self._unadmitted: set[int] = set()
        """Handles of the sequences that the scheduler has not scheduled yet."""
        self._held: dict[int, Turn] = {}
        """Maps handles to ended turns of clients' sessions whose KV blocks the replica keeps."""
        self.queue: QueueState | None = None
        """The last queue state that the scheduler announced, or None before the first."""
        self._num_others_waiting = 0
        """Number of other gateways' waiting requests when `queue` was announced."""
        self._is_blocked = False
        """Whether, in both of the scheduler's last two announcements, requests waited because KV
        blocks or token budget were lacking.
        """

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent to the replica, and the replica can run steps."""
        return self.is_connected and self._state.ready and not self.refusal

    @property
    def reason(self) -> str:
        """Why the replica is not ready. It is empty if the replica is ready."""
        if not self.is_connected:
            return self._why_disconnected
        return self.refusal or self._state.reason

    @property
    def limits(self) -> ModelLimits | None:
        """The replica's limits on requests, or None if no session is open."""
        if self.description is None or not self.is_connected:
            return None
        return self.description.limits

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def seconds_stalled(self) -> float | None:
        """Seconds since the replica became unable to run steps, or None if it can run them."""
        return None if self._stalled_since is None else self._clock.time() - self._stalled_since

    def seconds_disconnected(self) -> float | None:
        """Seconds since the last session ended, or None while a session is open."""
        return None if self.is_connected else self._clock.time() - self._disconnected_since

    @property
    def num_slots(self) -> int | None:
        """Limit on the number of sequences at this replica, or None if the scheduler did not report
        `max_num_seqs`.

        Normally the limit is `max_num_seqs`. If requests wait because KV blocks or token budget are
        lacking, the limit is the number of running sequences plus half the number of waiting
        sequences, so that fewer sequences wait at the replica.
        """
        if self.description is None or not self.description.max_num_seqs:
            return None
        if self.queue is not None and self._is_blocked:
            return self.queue.num_running + max(1, self.queue.num_waiting // 2)
        return self.description.max_num_seqs

    @property
    def num_free_slots(self) -> int:
        """Free slots for running sequences, negative while sequences wait at the replica."""
        return (self.num_slots or 0) - self.load.num_requests

    def queue_refusal(
        self, timeout_seconds: float | None, *, has_output: bool = False, num_arriving: float = 0
    ) -> ResourceExhausted | None:
        """Returns the error with which the scheduler would refuse a request with this timeout, or
        None if the scheduler may accept the request.

        The length of the replica's queue is estimated as the sum of three numbers: waiting requests
        of other gateways in the last announcement, unscheduled requests of this gateway, and
        `num_arriving`, the number of requests that will be sent earlier. If no request waits at the
        replica, requests that fit into the free slots are not counted.
        """
        if self.queue is None:
            return None
        num_own = len(self._unadmitted) + num_arriving
        if not self.queue.num_waiting:
            num_own -= min(num_own, max(0, self.num_free_slots + len(self._unadmitted)))
        num_waiting = int(self._num_others_waiting + num_own)
        return self.queue.refusal(timeout_seconds, has_output=has_output, num_waiting=num_waiting)

    def send(self, inflight: Inflight, route: RoutingDecision) -> None:
        """Sends a sequence to the replica, which must be ready."""
        handle = self._free_handle()
        self.running[handle] = inflight
        self._unadmitted.add(handle)
        inflight.sent(lambda: self._abort(handle), route, partial(self._end_turn, handle))
        self.load.sent(handle, inflight, route)
        self._link.add(handle, inflight)

    def continue_held(self, held: HeldSequence, inflight: Inflight) -> RoutingDecision:
        """Sends the next turn of a client's session, which continues the kept sequence `held`."""
        handle = held.handle
        del self._held[handle]
        self.load.num_sessions -= 1
        self.running[handle] = inflight
        self._unadmitted.add(handle)
        route = RoutingDecision(self.address, RoutingReason.SESSION, 1, held.num_tokens)
        inflight.sent(release=lambda: self._abort(handle), route=route)
        self.load.sent(handle, inflight, route)
        self._link.add_chunk(handle, inflight, held.num_tokens)
        return route

    def release(self, handle: int) -> None:
        if self._drop_held(handle):
            self._link.abort(handle)

    def turn_ended(self, handle: int, finish: Finish) -> None:
        """Called when a session's turn has ended, and the replica keeps the turn's sequence."""
        inflight = self._forget(handle)
        turn = None if inflight is None else inflight.request.turn
        if inflight is None or turn is None:
            return
        request = inflight.request
        num_tokens = len(request.prompt_token_ids) + len(inflight.output_token_ids) - 1
        self._held[handle] = turn
        self.load.num_sessions += 1
        shared = request.priority, request.cache_salt, request.adapter_digest
        turn.hold(HeldSequence(self, handle, partial(self.release, handle), num_tokens, *shared))
        inflight.finished(finish)

    def _drop_held(self, handle: int) -> bool:
        turn = self._held.pop(handle, None)
        if turn is None:
            return False
        self.load.num_sessions -= 1
        turn.drop_held()
        return True

    def take_back(self) -> list[Inflight]:
        """Aborts all sequences at the replica and returns them in order of arrival."""
        taken = sorted(self.running.values(), key=lambda inflight: inflight.number)
        for inflight in taken:
            inflight.taken_back(ResubmitCause.CANNOT_RUN_STEPS)
        return taken

    def opened(self, description: ReplicaDescription) -> None:
        self.description = description
        self.is_connected, self.is_draining = True, False
        logger.info(
            "session with scheduler %s opened: model %s, max_model_len %d",
            self.address,
            description.model_name,
            description.limits.max_model_len,
        )
        self._listener.replica_changed(self)

    def state_changed(self, state: ReplicaState) -> None:
        before, self._state = self._state, state
        if before == state:
            return
        self.is_draining = state.draining
        if not state.is_stalled:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._clock.time()
        if not state.ready:
            logger.warning("scheduler %s is not ready: %s", self.address, state.reason)
        elif before is not _UNKNOWN:
            logger.info("scheduler %s is ready again", self.address)
        self._listener.replica_changed(self)

    def queue_changed(self, queue: QueueState) -> None:
        """Called when the scheduler announces the state of its queue. One blocked announcement does
        not count, because the prompts of a burst may use the whole token budget of one step.
        """
        before, self.queue = self.queue, queue
        self._is_blocked = before is not None and before.is_blocked and queue.is_blocked
        self._num_others_waiting = max(0, queue.num_waiting - len(self._unadmitted))
        self._listener.load_reported(self)

    def load_changed(self, load: ReplicaLoad) -> None:
        self.load.reported(load)
        self._listener.load_reported(self)

    def admitted(self, handle: int, num_cached_tokens: int) -> None:
        self._unadmitted.discard(handle)
        block_size = 0 if self.description is None else self.description.block_size
        self.load.admitted(handle, num_cached_tokens, block_size, self._clock.time())
        if (inflight := self.running.get(handle)) is not None:
            inflight.admitted(num_cached_tokens)
            self._listener.sequence_started(inflight)

    def finished(self, handle: int, end: Finish | StepwellError) -> None:
        self._drop_held(handle)
        inflight = self._forget(handle)
        if inflight is None:
            return
        if not isinstance(end, StepwellError):
            inflight.finished(end)
            return
        if self.limits is not None and end.error_reason == NAN_IN_LOGITS:
            output, vocab_size = inflight.output_token_ids, self.limits.vocab_size
            end = why_no_token(inflight.request, output, vocab_size) or end
        elif end.error_reason == NO_CONFORMING_TOKEN:
            end = nothing_conforms(inflight.request, inflight.output_token_ids) or end
        inflight.failed(end)

    def rejected(self, handle: int, error: StepwellError) -> None:
        self._drop_held(handle)
        if (inflight := self._forget(handle)) is not None:
            self._listener.request_rejected(inflight, error, self)

    def closed(self, reason: str) -> None:
        """Called when the session with the scheduler has ended or could not be opened. The replica
        then loses all its sequences.
        """
        if self.is_connected:
            level = logging.INFO if reason is ENDED_HERE else logging.WARNING
            logger.log(
                level,
                "session with scheduler %s ended: %s; its %d requests continue at another replica "
                "or wait",
                self.address,
                reason,
                len(self.running),
            )
            self._disconnected_since = self._clock.time()
        self._why_disconnected = reason
        self.is_connected = False
        self.refusal = ""
        self._state, self._stalled_since = _UNKNOWN, None
        self.queue = None
        self._is_blocked = False
        self._unadmitted.clear()
        for handle in list(self._held):
            self._drop_held(handle)
        self.load.clear()
        self.recent_prefixes.clear()
        lost, self.running = list(self.running.values()), {}
        cause = ResubmitCause.SCHEDULER_LOST
        if self.is_draining:
            cause = ResubmitCause.SCHEDULER_DRAINED
        self._listener.replica_lost(lost, cause)

    def _abort(self, handle: int) -> None:
        if (inflight := self._forget(handle)) is not None:
            self._link.abort(handle, was_stopped=inflight.was_stopped)

    def _end_turn(self, handle: int, tool: str) -> None:
        if self.is_connected and self.description and self.description.retains_contexts:
            self._link.end_turn(handle, tool)

    def _forget(self, handle: int) -> Inflight | None:
        self._unadmitted.discard(handle)
        self.load.ended(handle)
        inflight = self.running.pop(handle, None)
        if inflight is not None:
            self._listener.sequence_left(inflight)
        return inflight

    def _free_handle(self) -> int:
        while (handle := next(self._handles) % _MAX_HANDLE) in self.running or handle in self._held:
            pass
        return handle


class ReplicaListener(Protocol):
    """The methods of the fleet by which a replica reports its events."""

    def replica_changed(self, replica: Replica) -> None:
        """A session with the scheduler was opened, or the replica became able or unable to run
        steps.
        """

    def replica_lost(self, inflights: list[Inflight], cause: ResubmitCause) -> None:
        """The session with the scheduler ended for `cause`. The replica had these sequences."""

    def request_rejected(self, inflight: Inflight, error: StepwellError, replica: Replica) -> None:
        """The scheduler refused a sequence."""

    def sequence_started(self, inflight: Inflight) -> None:
        """A sequence was scheduled at the replica for the first time."""

    def sequence_left(self, inflight: Inflight) -> None:
        """A sequence ended at the replica, or was aborted, refused or lost."""

    def load_reported(self, replica: Replica) -> None:
        """The replica's scheduler reported its queue or its load."""
