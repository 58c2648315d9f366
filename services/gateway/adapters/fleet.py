"""All replicas of a model as one engine that loses nothing when one of them dies or hangs."""

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import Aborted, ResourceExhausted, StepwellError, Unavailable
from services.gateway.adapters.inflight import Inflight, Mailbox, ended
from services.gateway.adapters.replica import Replica
from services.gateway.adapters.served_model import ServedModel
from services.gateway.adapters.waiting import WaitingQueue
from services.gateway.core.request import EngineRequest, ModelLimits

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
    session_timeout_seconds: float


class Fleet:
    """Sends each sequence to the ready replica with the fewest unfinished ones, and again when
    one dies, hangs, or cannot run steps.

    1. A sequence without a replica waits, in order of arrival, for `resubmit_timeout_seconds`.
    2. A replica that becomes ready gets those that wait. One whose session ends, or is silent for
       `session_timeout_seconds`, gives back those it had; one that is connected but cannot run
       steps gives them back after `migrate_after_seconds`, if another one is ready.
    3. What was given back goes elsewhere with all its tokens so far. A sequence under which
       replicas die again and again without a token between is given up: it may be the cause.
    4. Replicas with another fingerprint than the one in use get nothing; see ServedModel.

    Migration by token replay is NVIDIA Dynamo's; draws that depend on (seed, position) alone make
    it exact here.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        gateway_id: str,
        *,
        times: FleetTimes,
        rng: random.Random,
        tokenizer_fingerprint: bytes,
    ) -> None:
        self.replicas = [
            Replica(
                address,
                gateway_id,
                session_timeout_seconds=times.session_timeout_seconds,
                on_changed=self._replica_changed,
                on_lost=self._replica_lost,
                on_rejected=self._rejected,
            )
            for address in addresses
        ]
        self._migrate_after = times.migrate_after_seconds
        self._rng = rng
        self._numbers = itertools.count()
        self._waiting = WaitingQueue(
            times.resubmit_timeout_seconds, on_retry=self._try_again, on_expired=self._expired
        )
        self._model = ServedModel(tokenizer_fingerprint, times.resubmit_timeout_seconds, _loop_time)
        self._compare_again: asyncio.TimerHandle | None = None
        self._known_limits: ModelLimits | None = None
        # Set whenever a replica comes, goes, or changes; its reader clears it.
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Keeps the sessions open until cancelled."""
        async with asyncio.TaskGroup() as sessions:
            for replica in self.replicas:
                sessions.create_task(replica.run())

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
        ready = [replica.limits for replica in self.replicas if replica.is_ready]
        limits = _tightest([limits for limits in ready if limits is not None])
        if limits is None:
            raise _unavailable(self.why_not_ready())
        return limits

    def check_room(self, deadline: float | None) -> None:
        """Raises ResourceExhausted when every ready replica would refuse a request like this."""
        timeout = None if deadline is None else deadline - _loop_time()
        ready = [replica for replica in self.replicas if replica.is_ready]
        refusals = [replica.queue_refusal(timeout) for replica in ready]
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
            if replica is None:
                self._waiting.add(inflight)
            else:
                replica.send(inflight)
        return mailbox

    def give_up(self, error: StepwellError) -> None:
        """Ends every sequence with an error."""
        running = [i for replica in self.replicas for i in replica.inflights()]
        for inflight in [*running, *self._waiting]:
            self._drop(inflight)
            inflight.failed(error)

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

    def _drop(self, inflight: Inflight) -> None:
        inflight.release()
        self._waiting.discard(inflight)

    def _replica_changed(self, replica: Replica) -> None:
        """It connected, or became ready, or no longer is."""
        self._compare_models()
        if replica.is_ready:
            for inflight in self._waiting:
                inflight.refused_by.discard(replica.address)
        self._place_waiting()
        self._migrate()
        if replica.seconds_stalled() is not None:
            later = self._migrate_after + _TIMER_SLACK_SECONDS
            asyncio.get_running_loop().call_later(later, self._migrate)
        self.changed.set()

    def _compare_models(self) -> None:
        if self._model.compare(self.replicas):
            self._model_replaced()
        if self.num_ready:
            self._known_limits = self.limits()
        if self._compare_again is not None:
            self._compare_again.cancel()
            self._compare_again = None
        if (seconds := self._model.seconds_until_replaced()) is not None:
            loop = asyncio.get_running_loop()
            self._compare_again = loop.call_later(seconds, self._models_settled)

    def _models_settled(self) -> None:
        """The model in use did not come back in time: another one may be taken."""
        self._compare_again = None
        if any(replica.is_connected for replica in self.replicas):
            self._compare_models()
            self._place_waiting()
            self.changed.set()

    def _model_replaced(self) -> None:
        """Ends sequences that began under the model before; the others are sent to the new one."""
        before, now = (
            self._known_limits,
            _tightest([r.limits for r in self.replicas if r.limits is not None and not r.refusal]),
        )
        for inflight in self._waiting:
            if inflight.has_output or before != now:
                self._drop(inflight)
                inflight.failed(
                    Aborted(
                        "the model was replaced by another one while this request was served",
                        reason="MODEL_REPLACED",
                    )
                )

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
                    self._place(inflight)

    def _replica_lost(self, lost: list[Inflight]) -> None:
        if lost:
            logger.warning("%d requests go on elsewhere or when the scheduler is back", len(lost))
        for inflight in lost:
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
        self._place_waiting()
        self.changed.set()

    def _rejected(self, inflight: Inflight, error: StepwellError, replica: Replica) -> None:
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

    def _place_waiting(self) -> None:
        for inflight in self._waiting:
            replica = self._choose(inflight)
            if replica is not None:
                self._waiting.discard(inflight)
                replica.send(inflight)

    def _place(self, inflight: Inflight) -> None:
        replica = self._choose(inflight)
        if replica is None:
            self._waiting.add(inflight)
        else:
            replica.send(inflight)

    def _try_again(self, inflight: Inflight) -> None:
        inflight.refused_by.clear()
        self._place(inflight)

    def _expired(self, inflight: Inflight) -> None:
        why = self.why_not_ready() or "every replica refuses it"
        inflight.failed(_unavailable(f"this request found no scheduler in time: {why}"))


def _is_suspect(inflight: Inflight) -> bool:
    losses = inflight.losses
    return losses.num_computed > MAX_LOSSES_COMPUTED or losses.num_waited > MAX_LOSSES_WAITED


def _tightest(limits: Sequence[ModelLimits]) -> ModelLimits | None:
    if len(limits) <= 1:
        return limits[0] if limits else None
    return ModelLimits(
        max_model_len=min(one.max_model_len for one in limits),
        max_request_tokens=min(one.max_request_tokens for one in limits),
        vocab_size=min(one.vocab_size for one in limits),
        eos_token_ids=limits[0].eos_token_ids,
        priority_scheduling=all(one.priority_scheduling for one in limits),
        hidden_size=limits[0].hidden_size,
    )


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, reason="NO_REPLICA_READY", retry_after_seconds=1.0)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
