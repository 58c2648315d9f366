"""Makes all replicas of a model appear as one engine, which loses no token if a replica dies."""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from services.common.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    StepwellError,
    Unavailable,
)
from services.common.replica.queue_state import RETRY_AFTER_SECONDS
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.fleet.admission import Admission, Queued
from services.gateway.core.fleet.membership import Links, Membership, no_replica_ready
from services.gateway.core.fleet.placement import Placement
from services.gateway.core.fleet.replica import Replica
from services.gateway.core.fleet.routing.policy import RoutingPolicy
from services.gateway.core.fleet.waiting_queue import WaitingQueue
from services.gateway.core.ports import TIMER_SLACK_SECONDS, Clock
from services.gateway.core.request.arrivals import Arrival, Arrivals
from services.gateway.core.request.delta import Progress
from services.gateway.core.request.inflight import Inflight, Mailbox, ended
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request import EngineRequest
from services.gateway.core.routing_decision import RoutingDecision, RoutingReason
from services.gateway.core.traces.sequence_trace import ResubmitCause

logger = logging.getLogger(__name__)

_DEFAULT_RETRY_SECONDS = 0.1
NO_REPLICA = "no_replica"
"""The reason that is reported for the wait of a sequence that no replica accepts."""


class Fleet:
    """Sends each sequence (the prompt and one answer of a request) to the replica that the routing
    policy chooses. If the replica dies, hangs, refuses the sequence, or cannot run steps, the fleet
    sends the sequence to another replica.

    1. `admission` may queue a sequence before it is first sent.
    2. A sequence that no replica accepts waits in order of arrival for at most
       `resubmit_timeout_seconds`. It is sent when a replica becomes ready.
    3. When the gRPC session with a replica's scheduler ends, the replica counts as lost, and the
       fleet takes back its sequences. The fleet also takes back the sequences of a replica that has
       been unable to run steps for `migrate_after_seconds`, if another replica is ready.
    4. A sequence that was taken back is sent to another replica together with all its generated
       tokens. A sequence fails if it has been at several lost replicas in succession without
       getting a new token, since the sequence may be the cause of the losses.

    Migration by token replay is from NVIDIA Dynamo. The output of a sequence does not depend on
    migrations, since the draw of a token depends only on the seed, the position and the logits.
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
        nanos: Callable[[], int],
        max_num_queued_tokens: int | None = None,
    ) -> None:
        """`nanos` returns the time in nanoseconds on a steady clock. `max_num_queued_tokens` is the
        limit on the total number of prompt tokens of sequences without output. None means no limit.
        """
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
        self._max_num_queued_tokens = max_num_queued_tokens
        self._numbers = itertools.count()
        self.num_resubmissions = 0
        """Number of times that any sequence was sent again, because its replica was lost, could not
        run steps or refused the sequence.
        """
        self._waiting = WaitingQueue(
            resubmit_timeout_seconds, clock, on_retry=self._try_again, on_expired=self._expired
        )
        self.arrivals = Arrivals()
        self.admission = Admission()
        """Decides which sequences are queued before they are sent. By default no sequence is
        queued. The option `tenants` replaces this object before the first request.
        """

    def set_addresses(self, source: str, addresses: Iterable[str]) -> None:
        """Stores all addresses of schedulers that `source`, a setting or a registry, lists now."""
        if self.membership.set_addresses(source, addresses):
            self._update()

    # Methods of the interface Engine.

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self.admission)

    def queued(self, most: int) -> list[Queued]:
        """Returns at most `most` sequences that wait at this gateway, with the reasons."""
        unplaced = [Queued(inflight, NO_REPLICA) for inflight in self._waiting]
        return [*self.admission.queued(), *unplaced][:most]

    def limits(self) -> ModelLimits:
        return self.membership.limits()

    async def until_limits(self, on_wait: Callable[[str], None]) -> None:
        if self.membership.known_limits is None:
            on_wait(NO_REPLICA)
            await self.membership.until_limits()

    def _num_queued_tokens(self) -> int:
        """Returns the number of prompt tokens, computed or not, of all sequences without output."""
        running = [one for replica in self.membership.replicas for one in replica.running.values()]
        sequences = (*running, *self._waiting, *self.admission)
        return sum(len(one.request.prompt_token_ids) for one in sequences if not one.has_output)

    def _check_queued_tokens(self) -> None:
        most = self._max_num_queued_tokens
        if most is not None and (queued := self._num_queued_tokens()) >= most:
            raise ResourceExhausted(
                f"requests without output have {queued} prompt tokens; at {most} no further "
                "request is accepted",
                reason="QUEUED_TOKENS",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def check_room(self, caller: Caller, deadline: float | None) -> None:
        if deadline is not None and deadline <= self._clock.time():
            raise DeadlineExceeded(
                "the request's time limit passed before the gateway had read the request"
            )
        self._check_queued_tokens()
        self.admission.check_room(caller, deadline)
        self._placement.check_queues(deadline, self.arrivals.num(ANYONE))

    def model_fingerprint(self) -> bytes:
        return self.membership.model_fingerprint

    def arriving(self, caller: Caller, deadline: float | None) -> Arrival:
        self.check_room(caller, deadline)
        return self.arrivals.begin(caller)

    def start(
        self, requests: Sequence[EngineRequest], progress: Sequence[Progress] = ()
    ) -> Mailbox:
        """Sends sequences. Sequences with the same prompt are sent to the same replica, so that
        they share the prompt's KV blocks.
        """
        mailbox = Mailbox(requests, self._numbers, self._drop, self._nanos)
        replica, prompt = None, None
        for inflight in mailbox.resume(progress) if progress else mailbox.inflights:
            if inflight.request.turn is not None and self._continue(inflight):
                continue
            if self.admission.queues(inflight):
                self.admission.add(inflight)
            elif replica is not None and inflight.request.prompt_token_ids is prompt:
                route = RoutingDecision(replica.address, RoutingReason.SAME_PROMPT, 1)
                replica.send(inflight, route)
                self.admission.sent(inflight, route)
            else:
                replica = self.send(inflight)
                prompt = inflight.request.prompt_token_ids
        return mailbox

    def give_up(self, error: StepwellError) -> None:
        self.membership.give_up()
        for inflight in self.admission:
            self.admission.discard(inflight)
            inflight.failed(error)
        running = [i for replica in self.membership.replicas for i in replica.take_back()]
        for inflight in [*running, *self._waiting]:
            self._waiting.discard(inflight)
            inflight.failed(error)

    # Methods of the interface ReplicaListener, which replicas call.

    def replica_changed(self, replica: Replica) -> None:
        for inflight in self._waiting:
            inflight.refused_by.discard(replica.address)
        self._update()
        self._migrate()
        if replica.seconds_stalled() is not None:
            later = self._clock.time() + self._migrate_after + TIMER_SLACK_SECONDS
            self._clock.call_at(later, self._migrate)

    def replica_lost(self, inflights: list[Inflight], cause: ResubmitCause) -> None:
        self.membership.readiness_changed()
        for inflight in inflights:
            inflight.lost(cause)
            self.admission.left(inflight)
            finish = ended(inflight)
            if finish is not None:
                inflight.finished(finish)
            elif inflight.losses.are_suspicious:
                num_lost = inflight.losses.num_computed + inflight.losses.num_waited
                message = (
                    f"the request is given up: {num_lost} schedulers were lost while they "
                    "served the request"
                )
                inflight.failed(Aborted(message, reason="REPLICAS_LOST", may_retry=False))
            else:
                self._waiting.add(inflight)
        self._update()

    def request_rejected(self, inflight: Inflight, error: StepwellError, replica: Replica) -> None:
        """Sends the sequence to another replica. If all replicas have refused it, the sequence
        waits. It fails instead if the replicas' queues are full and no replica has accepted the
        sequence before.

        A sequence that is refused as invalid is sent once more. It has passed the gateway's checks,
        so its message may have been damaged in transit.
        """
        if isinstance(error, InvalidArgument) and not inflight.was_called_invalid:
            inflight.was_called_invalid = True
            inflight.refused_by.add(replica.address)
            if self._send(inflight) is None:
                inflight.refused_by.discard(replica.address)
                self.send(inflight)
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

    def load_reported(self, replica: Replica) -> None:
        self._placement.reported(replica)
        self.admission.admit()

    # Choice of the replica.

    def _send(self, inflight: Inflight) -> Replica | None:
        """Sends a sequence to a ready replica that has not refused it, if there is one."""
        placed = self._placement.place(inflight, self.admission)
        if placed is None:
            return None
        replica, route = placed
        self.num_resubmissions += inflight.was_sent
        replica.send(inflight, route)
        self.admission.sent(inflight, route)
        return replica

    def _continue(self, inflight: Inflight) -> bool:
        """If the sequence is a turn of a client's session, sends it to the replica that keeps the
        KV blocks of the previous turn. Returns whether there is such a replica.
        """
        turn = inflight.request.turn
        held = None if turn is None else turn.take_held(inflight.request)
        if held is None:
            return False
        for replica in self.membership.ready():
            if replica is held.replica:
                route = replica.continue_held(held, inflight)
                self.admission.sent(inflight, route)
                return True
        held.release()
        return False

    def send(self, inflight: Inflight) -> Replica | None:
        """Sends a sequence to a replica and returns the replica. If no replica is ready to accept
        the sequence, lets it wait and returns None.
        """
        replica = self._send(inflight)
        if replica is None:
            inflight.trace.found_no_replica()
            self._waiting.add(inflight)
        return replica

    def _send_waiting(self) -> None:
        for inflight in self._waiting:
            if self.admission.queues(inflight):
                if self.membership.num_ready:
                    self._waiting.discard(inflight)
                    self.admission.add(inflight)
            elif self._send(inflight) is not None:
                self._waiting.discard(inflight)
        self.admission.admit()

    def _migrate(self) -> None:
        """Takes sequences back from replicas that have been unable to run steps for too long."""
        if not self.membership.num_ready:
            return
        for replica in self.membership.replicas:
            stalled = replica.seconds_stalled()
            if stalled is not None and stalled >= self._migrate_after and replica.num_unfinished:
                logger.warning(
                    "%d requests are moved away from scheduler %s, which cannot run steps: %s",
                    replica.num_unfinished,
                    replica.address,
                    replica.reason,
                )
                for inflight in replica.take_back():
                    self.send(inflight)

    def _try_again(self, inflight: Inflight) -> None:
        inflight.refused_by.clear()
        self.send(inflight)

    def _expired(self, inflight: Inflight) -> None:
        why = self.membership.why_not_ready() or "every replica refuses the request"
        inflight.failed(
            no_replica_ready(f"the request was not sent to a replica within the time limit: {why}")
        )

    def _drop(self, inflight: Inflight) -> None:
        inflight.aborted()
        self._waiting.discard(inflight)
        self.admission.discard(inflight)

    def _update(self) -> None:
        """Updates the set of replicas, and sends waiting sequences to the ready replicas. If the
        model was replaced, a waiting sequence fails if it has output or the limits have changed.
        """
        limits = self.membership.known_limits
        if self.membership.update():
            for inflight in [*self._waiting, *self.admission]:
                if inflight.has_output or limits != self.membership.known_limits:
                    self._drop(inflight)
                    message = "the model was replaced by another model while the request was served"
                    inflight.failed(Aborted(message, reason="MODEL_REPLACED"))
        self._send_waiting()
