"""All replicas of a model as one engine that loses nothing when one of them dies or hangs."""

import itertools
import logging
from collections.abc import Mapping, Sequence

from services.common.errors import Aborted, ResourceExhausted, StepwellError, Unavailable
from services.gateway.core.inflight import Inflight, Mailbox, ended
from services.gateway.core.membership import Membership, no_replica_ready
from services.gateway.core.ports import TIMER_SLACK_SECONDS, Clock, Link
from services.gateway.core.replica import Replica
from services.gateway.core.request import EngineRequest, ModelLimits
from services.gateway.core.route import Route, RoutingReason
from services.gateway.core.routing.policy import RoutingPolicy
from services.gateway.core.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

_DEFAULT_RETRY_SECONDS = 0.1


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

    Migration by token replay is NVIDIA Dynamo's; draws that depend on (seed, position) alone make
    it exact here.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        clock: Clock,
        policy: RoutingPolicy,
        *,
        resubmit_timeout_seconds: float,
        migrate_after_seconds: float,
        tokenizer_fingerprint: bytes,
    ) -> None:
        self.membership = Membership(
            links,
            clock,
            self,
            tokenizer_fingerprint=tokenizer_fingerprint,
            patience_seconds=resubmit_timeout_seconds,
            on_model_absent=self._update,
        )
        self._clock = clock
        self._policy = policy
        self._migrate_after = migrate_after_seconds
        self._numbers = itertools.count()
        self._waiting = WaitingQueue(
            resubmit_timeout_seconds,
            clock,
            on_retry=self._try_again,
            on_expired=self._expired,
        )

    # What is asked of the fleet: it is the core's Engine.

    @property
    def num_waiting(self) -> int:
        """Sequences that have no replica at present."""
        return len(self._waiting)

    def limits(self) -> ModelLimits:
        return self.membership.limits()

    def check_room(self, deadline: float | None) -> None:
        timeout = self._timeout(deadline)
        refusals = [replica.queue_refusal(timeout) for replica in self.membership.ready()]
        if refusals and (first := refusals[0]) is not None and None not in refusals:
            raise first

    def start(self, requests: Sequence[EngineRequest]) -> Mailbox:
        """Sends sequences; those of one prompt to one replica, where they share its blocks."""
        mailbox = Mailbox(requests, self._numbers, self._drop)
        replica, prompt = None, None
        for inflight in mailbox.inflights:
            if replica is not None and inflight.request.prompt_token_ids is prompt:
                replica.send(inflight, Route(replica.address, RoutingReason.SAME_PROMPT, 1))
            else:
                replica = self._send_or_queue(inflight)
                prompt = inflight.request.prompt_token_ids
        return mailbox

    def give_up(self, error: StepwellError) -> None:
        """Ends every sequence with an error."""
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

    def replica_lost(self, inflights: list[Inflight]) -> None:
        if inflights:
            logger.warning(
                "%d requests go on elsewhere or when the scheduler is back", len(inflights)
            )
        for inflight in inflights:
            inflight.lost()
            finish = ended(inflight)
            if finish is not None:
                inflight.finished(finish)
            elif inflight.losses.are_suspicious:
                num_lost = inflight.losses.num_computed + inflight.losses.num_waited
                message = f"{num_lost} schedulers were lost under this request"
                inflight.failed(Aborted(message, reason="REPLICAS_LOST"))
            else:
                self._waiting.add(inflight)
        self._update()

    def request_rejected(self, inflight: Inflight, error: StepwellError, replica: Replica) -> None:
        """Another replica is asked. When all refuse, a new request is refused where queues are
        full, and waits where schedulers drain; one that was accepted before waits in any case.
        """
        if not isinstance(error, ResourceExhausted | Unavailable):
            inflight.failed(error)
            return
        inflight.refused_by.add(replica.address)
        if self._send(inflight) is not None:
            return
        if inflight.was_accepted or isinstance(error, Unavailable):
            self._waiting.add(inflight, error.retry_after_seconds or _DEFAULT_RETRY_SECONDS)
        else:
            inflight.failed(error)

    # Where sequences go.

    def _send(self, inflight: Inflight) -> Replica | None:
        """Sends a sequence to a replica that is ready and has not refused it; to one whose queue
        has room for it, if there is any. Returns the replica; None if there is none.
        """
        candidates = [
            replica
            for replica in self.membership.ready()
            if replica.address not in inflight.refused_by
        ]
        if not candidates:
            return None
        timeout = self._timeout(inflight.request.deadline)
        has_output = bool(inflight.output_token_ids)
        with_room = [
            replica
            for replica in candidates
            if replica.queue_refusal(timeout, has_output=has_output) is None
        ]
        candidates = with_room or candidates
        if len(candidates) == 1:
            (replica,) = candidates
            route = Route(replica.address, RoutingReason.ONLY, 1)
        else:
            route = self._policy.choose(inflight, candidates)
            (replica,) = (one for one in candidates if one.address == route.address)
        replica.send(inflight, route)
        return replica

    def _timeout(self, deadline: float | None) -> float | None:
        return None if deadline is None else deadline - self._clock.time()

    def _send_or_queue(self, inflight: Inflight) -> Replica | None:
        """Sends a sequence to a replica, and returns that, or lets the sequence wait for one."""
        replica = self._send(inflight)
        if replica is None:
            self._waiting.add(inflight)
        return replica

    def _send_waiting(self) -> None:
        for inflight in self._waiting:
            if self._send(inflight) is not None:
                self._waiting.discard(inflight)

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
        inflight.release()
        self._waiting.discard(inflight)

    def _update(self) -> None:
        """Sends what waits to the replicas that are ready now.

        When the model was replaced, sequences that have output, or that the limits of the new one
        may not allow, end.
        """
        limits = self.membership.known_limits
        if self.membership.update():
            for inflight in self._waiting:
                if inflight.has_output or limits != self.membership.known_limits:
                    self._drop(inflight)
                    message = "the model was replaced by another one while this request was served"
                    inflight.failed(Aborted(message, reason="MODEL_REPLACED"))
        self._send_waiting()
