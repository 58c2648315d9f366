"""The set of replicas. Determines which replicas accept requests, and the limits of requests."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from services.common.errors import Unavailable
from services.gateway.core.fleet.replica import Replica, ReplicaListener
from services.gateway.core.fleet.served_model import ServedModel
from services.gateway.core.ports import Clock, Links
from services.gateway.core.request.model_limits import ModelLimits, tightest_limits

logger = logging.getLogger(__name__)

LEAVE_AFTER_SECONDS = 3.0
"""Time without a session after which a replica is removed if no source lists its address. A drained
replica is removed as soon as its session has ended.
"""


class Membership:
    """The replicas of one model. Replicas with a different fingerprint are not ready.

    Sources, such as a setting or a registry, list addresses of schedulers. A new address becomes a
    replica at once. A replica whose address is no longer listed is kept while it has a session,
    since a session is better evidence of a scheduler than any source. So if a registry loses its
    data, no request is affected.

    The fleet calls `update` after each change of a replica.
    """

    def __init__(
        self,
        links: Links,
        clock: Clock,
        listener: ReplicaListener,
        *,
        tokenizer_fingerprint: bytes,
        patience_seconds: float,
        on_model_absent: Callable[[], None],
    ) -> None:
        """`on_model_absent` is called when no replica has served the model in use for
        `patience_seconds`. `update` may then replace the model.
        """
        self.replicas: list[Replica] = []
        """The replicas in order of joining. The list is replaced, not modified, by each change."""
        self.known_limits: ModelLimits | None = None
        """The tightest limits of the ready replicas, or the last known ones; None before any."""
        self.changed = asyncio.Event()
        """Set whenever a replica joins, leaves or changes. The reader clears it."""
        self._links = links
        self._clock = clock
        self._listener = listener
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._model = ServedModel(tokenizer_fingerprint, patience_seconds, clock, on_model_absent)

    def set_addresses(self, source: str, addresses: Iterable[str]) -> bool:
        """Stores all addresses that a source currently lists; returns whether a replica was
        removed. Call it repeatedly, since a replica may be removed later than its address.
        """
        self._addresses[source] = tuple(addresses)
        known = {replica.address for replica in self.replicas}
        for address in dict.fromkeys(self._addresses[source]):
            if address not in known:
                logger.info("scheduler %s joins, by %s", address, source)
                self._join(address)
        return self._remove_leaving()

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_ready]

    @property
    def model_fingerprint(self) -> bytes:
        """The fingerprint of the model in use; empty until a replica has connected."""
        return self._model.fingerprint

    @property
    def num_ready(self) -> int:
        return len(self.ready())

    def not_ready(self) -> dict[str, str]:
        """Maps the address of each replica that accepts no requests now to the reason."""
        return {
            replica.address: replica.reason for replica in self.replicas if not replica.is_ready
        }

    def why_not_ready(self) -> str:
        """The reason for which no request can be served now; empty if requests can be served."""
        if self.num_ready:
            return ""
        states = ", ".join(f"{address} ({why})" for address, why in self.not_ready().items())
        return f"no replica is ready: {states or 'none is known'}"

    def limits(self) -> ModelLimits:
        """`known_limits`. Raises Unavailable if no replica was ready so far."""
        if self.known_limits is None:
            raise no_replica_ready(self.why_not_ready())
        return self.known_limits

    def max_model_len(self) -> int | None:
        """The model's context length; None while no replica is ready."""
        return self.limits().max_model_len if self.num_ready else None

    def update(self) -> bool:
        """Compares the replicas' models; returns whether the model in use was replaced.

        Limits of a new model apply as soon as it is adopted, otherwise once a replica is ready.
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

    def _join(self, address: str) -> None:
        replica = Replica(address, self._links.make(address), self._clock, self._listener)
        self.replicas = [*self.replicas, replica]
        self._links.open(replica)
        self.changed.set()

    def _remove_leaving(self) -> bool:
        """Removes the replicas that have ended and are not listed; returns whether
        there were any.
        """
        named = {address for addresses in self._addresses.values() for address in addresses}
        leaving = [r for r in self.replicas if r.address not in named and _has_ended(r)]
        for replica in leaving:
            logger.info("scheduler %s left: %s", replica.address, replica.reason)
            self.replicas = [one for one in self.replicas if one is not replica]
            self._links.close(replica)
            self._model.left(replica)
        return bool(leaving)


def _has_ended(replica: Replica) -> bool:
    """Whether the replica is not expected to open a session again."""
    seconds = replica.seconds_disconnected()
    return seconds is not None and (replica.is_draining or seconds >= LEAVE_AFTER_SECONDS)


def no_replica_ready(why: str) -> Unavailable:
    """The error of a request that no replica accepts."""
    return Unavailable(why, reason="NO_REPLICA_READY", retry_after_seconds=1.0)
