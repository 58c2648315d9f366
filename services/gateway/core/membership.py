"""Which replicas there are, which of them take requests, and what a request may be there."""

import asyncio
from collections.abc import Callable, Mapping

from services.common.errors import Unavailable
from services.gateway.core.ports import Clock, Link
from services.gateway.core.replica import Replica, ReplicaListener
from services.gateway.core.request import ModelLimits, tightest_limits
from services.gateway.core.served_model import ServedModel


class Membership:
    """The replicas of one model; those with another fingerprint than the one in use are not ready.

    The fleet calls `update` after each change of a replica.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        clock: Clock,
        listener: ReplicaListener,
        *,
        tokenizer_fingerprint: bytes,
        patience_seconds: float,
        on_model_absent: Callable[[], None],
    ) -> None:
        """`links` has the way to each scheduler, by its address. `on_model_absent` is called when
        no replica has served the model in use for `patience_seconds`: `update` may replace it.
        """
        self.replicas = [Replica(address, link, clock, listener) for address, link in links.items()]
        self.known_limits: ModelLimits | None = None
        """The tightest limits of the ready replicas, or as they were last; None before."""
        self.changed = asyncio.Event()
        """Set whenever a replica comes, goes, or changes; its reader clears it."""
        self._model = ServedModel(tokenizer_fingerprint, patience_seconds, clock, on_model_absent)

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_ready]

    @property
    def num_ready(self) -> int:
        return len(self.ready())

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
        """`known_limits`. Raises Unavailable when no replica was ever ready."""
        if self.known_limits is None:
            raise no_replica_ready(self.why_not_ready())
        return self.known_limits

    def max_model_len(self) -> int | None:
        """The model's context while a replica is ready; None while none is."""
        return self.limits().max_model_len if self.num_ready else None

    def update(self) -> bool:
        """Compares the replicas' models; returns whether the one in use was replaced.

        A new model's limits hold from when it is taken, the others' from when a replica is ready.
        """
        was_replaced = self._model.compare(self.replicas)
        limits = [
            replica.limits
            for replica in self.replicas
            if replica.limits is not None
            and (replica.is_ready or (was_replaced and not replica.refusal))
        ]
        if limits:
            self.known_limits = tightest_limits(limits)
        self.changed.set()
        return was_replaced


def no_replica_ready(why: str) -> Unavailable:
    """The error of a request that no replica takes."""
    return Unavailable(why, reason="NO_REPLICA_READY", retry_after_seconds=1.0)
