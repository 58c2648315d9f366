"""All replicas of a model as one engine that loses nothing when one of them dies or hangs."""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.common.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.gateway.core.admission.admission import Admission
from services.gateway.core.admission.arrivals import Arrival
from services.gateway.core.admission.capacity import Capacity, capacity_of
from services.gateway.core.admission.queue_bounds import QueueBounds
from services.gateway.core.fleet.membership import Membership, no_replica_ready
from services.gateway.core.fleet.placement import Placement
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.route import Route, RoutingReason
from services.gateway.core.fleet.routing.policy import RoutingPolicy
from services.gateway.core.fleet.sequence_trace import ResubmitCause
from services.gateway.core.fleet.waiting_queue import WaitingQueue
from services.gateway.core.ports import TIMER_SLACK_SECONDS, Clock, Links
from services.gateway.core.request.inflight import Inflight, Mailbox, ended
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.progress import Progress
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.tenant import ANYONE, Tenant

logger = logging.getLogger(__name__)

_DEFAULT_RETRY_SECONDS = 0.1
NO_REPLICA = "no_replica"
"""Why a sequence waits that no ready replica takes."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A sequence that waits at this gateway: why, and for how long, where that is known."""

    inflight: Inflight
    reason: str
    seconds: float | None = None


class Fleet:
    """Sends each sequence to the replica that the policy chooses, and to another one when that one
    is lost, hangs, refuses it, or cannot run steps.

    1. A sequence without a replica waits, in order of arrival, for `resubmit_timeout_seconds`.
    2. A replica that becomes ready gets the sequences that wait. One whose session ends gives back
       those it had; one that is connected but cannot run steps gives them back after
       `migrate_after_seconds`, if another one is ready.
    3. What was given back is sent to another replica with all its tokens so far. A sequence under
       which replicas are lost again and again without a token between is given up: it may be the
       cause.
    4. Before it is sent first, a sequence of a tenant may wait in the queues of Admission, so that
       no tenant takes all replicas for itself. Without tenants no sequence waits there.

    Migration by token replay is NVIDIA Dynamo's; draws that depend on (seed, position) alone make
    it exact here.
    """

    def __init__(
        self,
        links: Links,
        clock: Clock,
        policy: RoutingPolicy,
        *,
        resubmit_timeout_seconds: float,
        migrate_after_seconds: float,
        tokenizer_fingerprint: bytes,
        queue_bounds: QueueBounds,
        nanos: Callable[[], int],
    ) -> None:
        """`nanos` is a steady clock, by which the times of requests are taken."""
        self.membership = Membership(
            links,
            clock,
            self,
            tokenizer_fingerprint=tokenizer_fingerprint,
            patience_seconds=resubmit_timeout_seconds,
            on_model_absent=self._update,
        )
        self._placement = Placement(self.membership, policy, clock)
        self._clock = clock
        self._migrate_after = migrate_after_seconds
        self._nanos = nanos
        self._bounds = queue_bounds
        self._numbers = itertools.count()
        self.num_resubmissions = 0
        """Sequences that were sent again, after a replica was lost, stalled or refused them."""
        self._waiting = WaitingQueue(
            resubmit_timeout_seconds,
            clock,
            on_retry=self._try_again,
            on_expired=self._expired,
        )
        self.admission = Admission(
            clock, queue_bounds, capacity=self._capacity, send=self._send_or_queue
        )

    def set_addresses(self, source: str, addresses: Iterable[str]) -> None:
        """Where schedulers are now, as far as this source knows; see Membership."""
        if self.membership.set_addresses(source, addresses):
            self._update()

    # What is asked of the fleet: it is the core's Engine.

    @property
    def num_waiting(self) -> int:
        """Sequences that have no replica at present."""
        return len(self._waiting) + len(self.admission)

    def queued(self, most: int) -> list[Queued]:
        """Sequences that have no replica at present, `most` of them, and why."""
        kept = [Queued(one, why.value, since) for one, why, since in self.admission.waits()]
        unplaced = [Queued(inflight, NO_REPLICA) for inflight in self._waiting]
        return [*kept, *unplaced][:most]

    def limits(self) -> ModelLimits:
        return self.membership.limits()

    def _num_queued_tokens(self) -> int:
        """Prompt tokens of the sequences without output, those that are computed included."""
        running = [one for replica in self.membership.replicas for one in replica.running.values()]
        sequences = (*running, *self._waiting, *self.admission)
        return sum(len(one.request.prompt_token_ids) for one in sequences if not one.has_output)

    def check_room(self, tenant: Tenant, deadline: float | None) -> None:
        if deadline is not None and deadline <= self._clock.time():
            raise DeadlineExceeded("the time that this request allows passed before it was read")
        self._bounds.check_tokens(self._num_queued_tokens)
        if tenant != ANYONE:
            self.admission.check_room(tenant, deadline)
        self._placement.check_queues(deadline, self.admission.arrivals.num(ANYONE))

    def model_fingerprint(self) -> bytes:
        return self.membership.model_fingerprint

    def arriving(self, tenant: Tenant, deadline: float | None) -> Arrival:
        self.check_room(tenant, deadline)
        return self.admission.arrivals.begin(tenant)

    def start(
        self, requests: Sequence[EngineRequest], progress: Sequence[Progress] = ()
    ) -> Mailbox:
        """Sends sequences; those of one prompt to one replica, where they share its blocks."""
        mailbox = Mailbox(requests, self._numbers, self._drop, self._nanos)
        replica, prompt = None, None
        for inflight in mailbox.resume(progress) if progress else mailbox.inflights:
            if inflight.request.session is not None and self._continue(inflight):
                continue
            if inflight.request.tenant != ANYONE and not inflight.was_accepted:
                self.admission.add(inflight)
            elif replica is not None and inflight.request.prompt_token_ids is prompt:
                replica.send(inflight, Route(replica.address, RoutingReason.SAME_PROMPT, 1))
            else:
                replica = self._send_or_queue(inflight)
                prompt = inflight.request.prompt_token_ids
        return mailbox

    def give_up(self, error: StepwellError) -> None:
        """Ends every sequence with an error."""
        for inflight in self.admission:
            self.admission.discard(inflight)
            inflight.failed(error)
        running = [i for replica in self.membership.replicas for i in replica.take_back()]
        for inflight in [*running, *self._waiting]:
            self._waiting.discard(inflight)
            inflight.failed(error)

    # What replicas report: Fleet is their ReplicaListener.

    def replica_changed(self, replica: Replica) -> None:
        for inflight in self._waiting:
            inflight.refused_by.discard(replica.address)
        self._update()
        self._migrate()
        if replica.seconds_stalled() is not None:
            later = self._clock.time() + self._migrate_after + TIMER_SLACK_SECONDS
            self._clock.call_at(later, self._migrate)

    def replica_lost(self, inflights: list[Inflight], cause: ResubmitCause) -> None:
        for inflight in inflights:
            inflight.lost(cause)
            self.admission.left(inflight)
            finish = ended(inflight)
            if finish is not None:
                inflight.finished(finish)
            elif inflight.losses.are_suspicious:
                num_lost = inflight.losses.num_computed + inflight.losses.num_waited
                message = f"{num_lost} schedulers were lost under this request"
                inflight.failed(Aborted(message, reason="REPLICAS_LOST", may_retry=False))
            else:
                self._waiting.add(inflight)
        self._update()

    def request_rejected(self, inflight: Inflight, error: StepwellError, replica: Replica) -> None:
        """Another replica is asked. When all refuse, a new request is refused where queues are
        full, and waits where schedulers drain; one that was accepted before waits in any case. One
        that is called invalid was checked here before it was sent, and may have changed on its way:
        it is sent once more.
        """
        if isinstance(error, InvalidArgument) and not inflight.was_called_invalid:
            inflight.was_called_invalid = True
            inflight.refused_by.add(replica.address)
            if self._send(inflight) is None:
                inflight.refused_by.discard(replica.address)
                self._send_or_queue(inflight)
            return
        if not isinstance(error, ResourceExhausted | Unavailable):
            inflight.failed(error)
            return
        inflight.refused_by.add(replica.address)
        inflight.trace.refused(error)
        if self._send(inflight) is not None:
            return
        if inflight.was_accepted or isinstance(error, Unavailable):
            self._waiting.add(inflight, error.retry_after_seconds or _DEFAULT_RETRY_SECONDS)
        else:
            inflight.failed(error)

    def sequence_started(self, inflight: Inflight) -> None:
        self.admission.started(inflight)

    def sequence_left(self, inflight: Inflight) -> None:
        self.admission.left(inflight)

    def load_reported(self) -> None:
        self.admission.admit()

    # Where sequences go.

    def _send(self, inflight: Inflight) -> Replica | None:
        """Sends a sequence to a replica that is ready and has not refused it. Returns the replica;
        None if there is none.
        """
        placed = self._placement.place(inflight)
        if placed is None:
            return None
        replica, route = placed
        self.num_resubmissions += inflight.was_sent
        replica.send(inflight, route)
        if inflight.request.tenant != ANYONE:
            self.admission.sent(inflight, route)
        return replica

    def _continue(self, inflight: Inflight) -> bool:
        """Sends a turn of a session to the replica that keeps it, in its place there; returns False
        if none does that can run steps.
        """
        session = inflight.request.session
        held = None if session is None else session.take_held()
        if held is None:
            return False
        for replica in self.membership.ready():
            if replica is held.holder and held.fits(inflight.request):
                route = replica.continue_session(held, inflight)
                if inflight.request.tenant != ANYONE:
                    self.admission.sent(inflight, route)
                return True
        held.release()
        return False

    def _capacity(self) -> Capacity | None:
        return capacity_of(self.membership.ready())

    def _send_or_queue(self, inflight: Inflight) -> Replica | None:
        """Sends a sequence to a replica, and returns that, or lets the sequence wait for one."""
        replica = self._send(inflight)
        if replica is None:
            inflight.trace.found_no_replica()
            self._waiting.add(inflight)
        return replica

    def _send_waiting(self) -> None:
        for inflight in self._waiting:
            if inflight.request.tenant != ANYONE and not inflight.was_accepted:
                if self.membership.num_ready:
                    self._waiting.discard(inflight)
                    self.admission.add(inflight)
            elif self._send(inflight) is not None:
                self._waiting.discard(inflight)
        self.admission.admit()

    def _migrate(self) -> None:
        """Takes sequences from replicas that have not been able to run steps for too long."""
        if not self.membership.num_ready:
            return
        for replica in self.membership.replicas:
            stalled = replica.seconds_stalled()
            if stalled is not None and stalled >= self._migrate_after and replica.num_unfinished:
                logger.warning(
                    "%d requests leave scheduler %s, which cannot run steps: %s",
                    replica.num_unfinished,
                    replica.address,
                    replica.reason,
                )
                for inflight in replica.take_back():
                    self._send_or_queue(inflight)

    def _try_again(self, inflight: Inflight) -> None:
        inflight.refused_by.clear()
        self._send_or_queue(inflight)

    def _expired(self, inflight: Inflight) -> None:
        why = self.membership.why_not_ready() or "every replica refuses it"
        inflight.failed(no_replica_ready(f"this request found no scheduler in time: {why}"))

    def _drop(self, inflight: Inflight) -> None:
        """Ends a sequence, wherever it is."""
        inflight.aborted()
        self._waiting.discard(inflight)
        self.admission.discard(inflight)

    def _update(self) -> None:
        """Sends what waits to the replicas that are ready now.

        When the model was replaced, sequences that have output, or that the limits of the new one
        may not allow, end.
        """
        limits = self.membership.known_limits
        if self.membership.update():
            for inflight in [*self._waiting, *self.admission]:
                if inflight.has_output or limits != self.membership.known_limits:
                    self._drop(inflight)
                    message = "the model was replaced by another one while this request was served"
                    inflight.failed(Aborted(message, reason="MODEL_REPLACED"))
        self._send_waiting()
