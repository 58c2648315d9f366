"""All replicas of a model as one engine that loses nothing when one of them dies or hangs."""

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import Aborted, ResourceExhausted, StepwellError, Unavailable
from services.gateway.core.inflight import Inflight, Mailbox, ended
from services.gateway.core.ports import Clock, Link, Timer
from services.gateway.core.replica import Replica
from services.gateway.core.request import EngineRequest, ModelLimits, tightest_limits
from services.gateway.core.served_model import ServedModel
from services.gateway.core.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

MAX_LOSSES_COMPUTED = 5
MAX_LOSSES_WAITED = 50
_DEFAULT_RETRY_SECONDS = 0.1
_TIMER_SLACK_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class FleetTimes:
    """How long the fleet waits, in seconds; see the settings of the same names."""

    resubmit_timeout_seconds: float
    migrate_after_seconds: float


class Fleet:
    """Sends each sequence to the ready replica with the fewest unfinished ones, and again when
    one dies, hangs, or cannot run steps.

    1. A sequence without a replica waits, in order of arrival, for `resubmit_timeout_seconds`.
    2. A replica that becomes ready gets the sequences that wait. One whose session ends gives back
       those it had; one that is connected but cannot run steps gives them back after
       `migrate_after_seconds`, if another one is ready.
    3. What was given back goes elsewhere with all its tokens so far. A sequence under which
       replicas die again and again without a token between is given up: it may be the cause.
    4. Replicas with another fingerprint than the one in use get nothing; see ServedModel.

    Migration by token replay is NVIDIA Dynamo's; draws that depend on (seed, position) alone make
    it exact here.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        clock: Clock,
        *,
        times: FleetTimes,
        rng: random.Random,
        tokenizer_fingerprint: bytes,
    ) -> None:
        """`links` has the way to each scheduler, by its address."""
        self.replicas = [Replica(address, link, clock, self) for address, link in links.items()]
        self._clock = clock
        self._migrate_after = times.migrate_after_seconds
        self._rng = rng
        self._numbers = itertools.count()
        self._waiting = WaitingQueue(
            times.resubmit_timeout_seconds,
            clock,
            on_retry=self._try_again,
            on_expired=self._expired,
        )
        self._model = ServedModel(tokenizer_fingerprint, times.resubmit_timeout_seconds, clock)
        self._compare_again: Timer | None = None
        self._known_limits: ModelLimits | None = None
        # Set whenever a replica comes, goes, or changes; its reader clears it.
        self.changed = asyncio.Event()

    # What is asked of the fleet.

    @property
    def num_ready(self) -> int:
        """Replicas that take requests now."""
        return sum(replica.is_ready for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no replica at present."""
        return len(self._waiting)

    def not_ready(self) -> dict[str, str]:
        """Why, by address, of the replicas that take no requests now."""
        return {
            replica.address: replica.reason for replica in self.replicas if not replica.is_ready
        }

    def why_not_ready(self) -> str:
        """Why requests cannot be served now; empty when they can."""
        if self.num_ready:
            return ""
        states = ", ".join(f"{address} ({why})" for address, why in self.not_ready().items())
        return f"no replica is ready: {states}"

    def limits(self) -> ModelLimits:
        """The tightest limits of the ready replicas; while none is ready, as they were last.

        Raises Unavailable when none was ever ready.
        """
        if not self.num_ready and self._known_limits is not None:
            return self._known_limits
        limits = _limits_of(replica for replica in self.replicas if replica.is_ready)
        if limits is None:
            raise _unavailable(self.why_not_ready())
        return limits

    def max_model_len(self) -> int | None:
        """The model's context while a replica is ready; None while none is."""
        return self.limits().max_model_len if self.num_ready else None

    def check_room(self, deadline: float | None) -> None:
        """Raises ResourceExhausted when every ready replica would refuse a request like this."""
        timeout = None if deadline is None else deadline - self._clock.time()
        refusals = [r.queue_refusal(timeout) for r in self.replicas if r.is_ready]
        if refusals and (first := refusals[0]) is not None and None not in refusals:
            raise first

    def start(self, requests: Sequence[EngineRequest]) -> Mailbox:
        """Sends sequences; those of one prompt to one replica, where they share its blocks."""
        mailbox = Mailbox(requests, self._numbers, self._drop)
        replica, prompt = None, None
        for inflight in mailbox.inflights:
            if replica is None or inflight.request.prompt_token_ids is not prompt:
                replica = self._choose(inflight)
                prompt = inflight.request.prompt_token_ids
            self._send_or_queue(inflight, replica)
        return mailbox

    def give_up(self, error: StepwellError) -> None:
        """Ends every sequence with an error."""
        running = [i for replica in self.replicas for i in replica.inflights()]
        for inflight in [*running, *self._waiting]:
            self._drop(inflight)
            inflight.failed(error)

    # What replicas report: Fleet is their ReplicaListener.

    def replica_changed(self, replica: Replica) -> None:
        self._compare_models()
        if replica.is_ready:
            for inflight in self._waiting:
                inflight.refused_by.discard(replica.address)
        self._send_waiting()
        self._migrate()
        if replica.seconds_stalled() is not None:
            later = self._clock.time() + self._migrate_after + _TIMER_SLACK_SECONDS
            self._clock.call_at(later, self._migrate)
        self.changed.set()

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
            elif _is_suspect(inflight):
                inflight.failed(
                    Aborted(
                        f"{inflight.losses.total} schedulers were lost under this request",
                        reason="REPLICAS_LOST",
                    )
                )
            else:
                self._waiting.add(inflight)
        self._compare_models()
        self._send_waiting()
        self.changed.set()

    def request_rejected(self, inflight: Inflight, error: StepwellError, replica: Replica) -> None:
        """Another replica is asked. When all refuse, a new request is refused where queues are
        full, and waits where schedulers drain; one that was accepted before waits in any case.
        """
        if not isinstance(error, ResourceExhausted | Unavailable):
            inflight.failed(error)
            return
        inflight.refused_by.add(replica.address)
        other = self._choose(inflight)
        if other is not None:
            other.send(inflight)
        elif inflight.was_accepted or isinstance(error, Unavailable):
            self._waiting.add(inflight, error.retry_after_seconds or _DEFAULT_RETRY_SECONDS)
        else:
            inflight.failed(error)

    # Choice and migration.

    def _choose(self, inflight: Inflight) -> Replica | None:
        candidates = [
            replica
            for replica in self.replicas
            if replica.is_ready and replica.address not in inflight.refused_by
        ]
        if not candidates:
            return None
        least = min(replica.num_unfinished for replica in candidates)
        return self._rng.choice([r for r in candidates if r.num_unfinished == least])

    def _send_or_queue(self, inflight: Inflight, replica: Replica | None) -> None:
        if replica is None:
            self._waiting.add(inflight)
        else:
            replica.send(inflight)

    def _send_waiting(self) -> None:
        for inflight in self._waiting:
            replica = self._choose(inflight)
            if replica is not None:
                self._waiting.discard(inflight)
                replica.send(inflight)

    def _migrate(self) -> None:
        """Takes sequences from replicas that have not been able to run steps for too long."""
        if not self.num_ready:
            return
        for replica in self.replicas:
            stalled = replica.seconds_stalled()
            if stalled is not None and stalled >= self._migrate_after and replica.num_unfinished:
                logger.warning(
                    "%d requests leave scheduler %s, which cannot run steps: %s",
                    replica.num_unfinished,
                    replica.address,
                    replica.reason,
                )
                for inflight in replica.take_back():
                    self._send_or_queue(inflight, self._choose(inflight))

    def _try_again(self, inflight: Inflight) -> None:
        inflight.refused_by.clear()
        self._send_or_queue(inflight, self._choose(inflight))

    def _expired(self, inflight: Inflight) -> None:
        why = self.why_not_ready() or "every replica refuses it"
        inflight.failed(_unavailable(f"this request found no scheduler in time: {why}"))

    def _drop(self, inflight: Inflight) -> None:
        inflight.release()
        self._waiting.discard(inflight)

    # The model in use.

    def _compare_models(self) -> None:
        if self._model.compare(self.replicas):
            self._model_replaced()
        if self.num_ready:
            self._known_limits = self.limits()
        if self._compare_again is not None:
            self._compare_again.cancel()
            self._compare_again = None
        if (when := self._model.compare_again_at()) is not None:
            self._compare_again = self._clock.call_at(when, self._model_is_away)

    def _model_is_away(self) -> None:
        """The model in use did not come back in time: another one may be taken."""
        self._compare_again = None
        if any(replica.is_connected for replica in self.replicas):
            self._compare_models()
            self._send_waiting()
            self.changed.set()

    def _model_replaced(self) -> None:
        """Ends sequences that began under the model before; the others are sent to the new one."""
        before = self._known_limits
        now = _limits_of(replica for replica in self.replicas if not replica.refusal)
        for inflight in self._waiting:
            if inflight.has_output or before != now:
                self._drop(inflight)
                inflight.failed(
                    Aborted(
                        "the model was replaced by another one while this request was served",
                        reason="MODEL_REPLACED",
                    )
                )


def _is_suspect(inflight: Inflight) -> bool:
    losses = inflight.losses
    return losses.num_computed > MAX_LOSSES_COMPUTED or losses.num_waited > MAX_LOSSES_WAITED


def _limits_of(replicas: Iterable[Replica]) -> ModelLimits | None:
    limits = [replica.limits for replica in replicas if replica.limits is not None]
    return tightest_limits(limits) if limits else None


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, reason="NO_REPLICA_READY", retry_after_seconds=1.0)
