"""All replicas of a model as one engine that loses nothing when one of them dies."""

import asyncio
import logging
import random
from collections.abc import Sequence

from services.common.errors import Aborted, ResourceExhausted, StepwellError, Unavailable
from services.gateway.adapters.inflight import Inflight, Mailbox, ended
from services.gateway.adapters.replica import Replica
from services.gateway.core.request import EngineRequest, ModelLimits

logger = logging.getLogger(__name__)

MAX_LOSSES_WITHOUT_TOKEN = 5
_DEFAULT_RETRY_SECONDS = 0.1


class Fleet:
    """Sends each sequence to the replica with the fewest unfinished ones, and again when one dies.

    A sequence whose replica was lost goes, with all its tokens so far, to another one or to the
    same one once it is back; if there is none for `resubmit_timeout_seconds` it fails. One under
    which replicas die again and again without a token between is given up: it may be the cause.
    Migration by token replay is NVIDIA Dynamo's; draws that depend on (seed, position) alone make
    it exact here.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        gateway_id: str,
        *,
        resubmit_timeout_seconds: float,
        rng: random.Random,
    ) -> None:
        self.replicas = [
            Replica(
                address,
                gateway_id,
                on_ready=self._replica_ready,
                on_lost=self._replica_lost,
                on_rejected=self._rejected,
            )
            for address in addresses
        ]
        self._resubmit_timeout = resubmit_timeout_seconds
        self._rng = rng
        self._orphans: set[Inflight] = set()
        # Set whenever a replica comes or goes; whoever waits for it clears it.
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

    def why_not_ready(self) -> str:
        """Why requests cannot be served now; empty when they can."""
        if self.num_ready:
            return ""
        states = ", ".join(f"{replica.address} ({replica.reason})" for replica in self.replicas)
        return f"no replica is ready: {states}"

    def limits(self) -> ModelLimits:
        """The tightest limits of the replicas that are ready. Raises Unavailable without one."""
        ready = [replica.limits for replica in self.replicas if replica.limits is not None]
        if not ready:
            raise _unavailable(self.why_not_ready())
        if len(ready) == 1:
            return ready[0]
        return ModelLimits(
            max_model_len=min(limits.max_model_len for limits in ready),
            max_request_tokens=min(limits.max_request_tokens for limits in ready),
            vocab_size=min(limits.vocab_size for limits in ready),
            eos_token_ids=ready[0].eos_token_ids,
            priority_scheduling=all(limits.priority_scheduling for limits in ready),
            hidden_size=ready[0].hidden_size,
        )

    def start(self, requests: Sequence[EngineRequest]) -> Mailbox:
        """Sends sequences; those of one prompt to one replica, where they share its blocks."""
        mailbox = Mailbox(requests, self._drop)
        if not self.num_ready:
            raise _unavailable(self.why_not_ready())
        replica, prompt = None, None
        for inflight in mailbox.inflights:
            if replica is None or inflight.request.prompt_token_ids is not prompt:
                replica = self._choose(inflight)
                prompt = inflight.request.prompt_token_ids
            assert replica is not None
            replica.send(inflight)
        return mailbox

    def give_up(self, error: StepwellError) -> None:
        """Ends every sequence with an error."""
        running = [i for replica in self.replicas for i in replica.inflights()]
        for inflight in [*running, *self._orphans]:
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
        self._adopt(inflight)

    def _replica_ready(self, replica: Replica) -> None:
        self.changed.set()
        for inflight in tuple(self._orphans):
            inflight.refused_by.discard(replica.address)
            self._place(inflight)

    def _replica_lost(self, lost: list[Inflight]) -> None:
        self.changed.set()
        if lost:
            logger.warning("%d requests go on elsewhere or when the scheduler is back", len(lost))
        for inflight in lost:
            inflight.losses += 1
            finish = ended(inflight)
            if finish is not None:
                inflight.finished(finish)
            elif inflight.losses > MAX_LOSSES_WITHOUT_TOKEN:
                inflight.failed(
                    Aborted(
                        f"{inflight.losses} schedulers were lost under this request",
                        reason="REPLICAS_LOST",
                    )
                )
            else:
                inflight.was_accepted = True
                self._place(inflight)

    def _rejected(self, inflight: Inflight, error: StepwellError, replica: Replica) -> None:
        """Another replica is asked; when all refuse, a new request is refused, an old one waits."""
        if not isinstance(error, ResourceExhausted | Unavailable):
            inflight.failed(error)
            return
        inflight.refused_by.add(replica.address)
        other = self._choose(inflight)
        if other is not None:
            other.send(inflight)
        elif not inflight.was_accepted:
            inflight.failed(error)
        else:
            self._orphan(inflight, error.retry_after_seconds or _DEFAULT_RETRY_SECONDS)

    def _place(self, inflight: Inflight) -> None:
        """Sends a sequence that had a replica to another; it waits where there is none."""
        replica = self._choose(inflight)
        if replica is None:
            self._orphan(inflight, self._resubmit_timeout)
        else:
            self._adopt(inflight)
            replica.send(inflight)

    def _orphan(self, inflight: Inflight, retry_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if inflight.orphaned_until is None:
            inflight.orphaned_until = loop.time() + self._resubmit_timeout
        self._adopt(inflight)
        self._orphans.add(inflight)
        inflight.release = _nothing
        when = min(inflight.orphaned_until, loop.time() + retry_seconds)
        inflight.expiry = loop.call_at(when, self._try_again, inflight)

    def _try_again(self, inflight: Inflight) -> None:
        deadline = inflight.orphaned_until
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            self._adopt(inflight)
            why = self.why_not_ready() or "every replica refuses it"
            inflight.failed(_unavailable(f"the scheduler of this request was lost, and {why}"))
            return
        inflight.refused_by.clear()
        self._place(inflight)

    def _adopt(self, inflight: Inflight) -> None:
        """It waits no more, for one reason or another."""
        self._orphans.discard(inflight)
        if inflight.expiry is not None:
            inflight.expiry.cancel()
            inflight.expiry = None


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, reason="NO_REPLICA_READY", retry_after_seconds=1.0)


def _nothing() -> None:
    return None
