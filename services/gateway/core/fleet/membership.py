"""The set of replicas, which determines the ready replicas and the limits for requests."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from services.common.errors import Unavailable
from services.gateway.core.fleet.link import Link
from services.gateway.core.fleet.replica import Replica, ReplicaListener
from services.gateway.core.fleet.served_model import ServedModel
from services.gateway.core.ports import Clock
from services.gateway.core.request.model_limits import ModelLimits, tightest_limits

logger = logging.getLogger(__name__)

LEAVE_AFTER_SECONDS = 3.0
"""A replica whose address no source lists any more is removed when this gateway has had no session
with its scheduler for this number of seconds. A draining replica is removed without this delay.
"""


class Links(Protocol):
    """The connections to all schedulers."""

    def make(self, address: str) -> Link:
        """Makes the link to the scheduler at an address. The link may be used after `open`."""

    def open(self, replica: Replica) -> None:
        """Opens a session, a gRPC stream, with the replica's scheduler, and a new one whenever it
        ends.
        """

    def close(self, replica: Replica) -> None:
        """Ends the replica's session without opening a new one."""


class Membership:
    """The replicas of one model. A replica that serves another model never becomes ready.

    Sources, such as a setting or a registry, list addresses of schedulers. For a new address, a
    replica is added at once. A replica whose address is no longer listed is kept while it has an
    open session, which proves that the scheduler exists. So no request is affected if a registry
    loses its data.

    The class `Fleet` calls `update` after each change of a replica's state.
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
        """`on_model_absent` is called when no replica has served the current model for
        `patience_seconds`. The next `update` may then choose the model of the connected replicas.
        """
        self.replicas: list[Replica] = []
        """The replicas in order of joining. A change replaces the list and does not modify it."""
        self.known_limits: ModelLimits | None = None
        """The tightest limits of all ready replicas, or the last known limits if no replica is
        ready. It is None before the first replica was ready.
        """
        self.changed = asyncio.Event()
        """Set whenever a replica joins, leaves or changes. The task that waits for it clears it."""
        self._ready: Sequence[Replica] | None = None
        self._by_address: dict[str, Replica] = {}
        self._has_limits = asyncio.Event()
        self._patience_seconds = patience_seconds
        self._links = links
        self._clock = clock
        self._listener = listener
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._model = ServedModel(tokenizer_fingerprint, patience_seconds, clock, on_model_absent)

    def set_addresses(self, source: str, addresses: Iterable[str]) -> bool:
        """Stores all addresses that a source currently lists. Returns whether a replica was
        removed. Must be called repeatedly, since replicas may be removed later than their
        addresses.
        """
        self._addresses[source] = tuple(addresses)
        for address in self._addresses[source]:
            if address not in self._by_address:
                logger.info("scheduler %s is added: listed by %s", address, source)
                self._join(address)
        return self._remove_leaving()

    def ready(self) -> Sequence[Replica]:
        """Returns the ready replicas, as one list object until `readiness_changed` is called."""
        if self._ready is None:
            self._ready = [replica for replica in self.replicas if replica.is_ready]
        return self._ready

    def at(self, address: str) -> Replica:
        return self._by_address[address]

    def readiness_changed(self) -> None:
        """Must be called after a replica became ready or unready and before `ready` is called."""
        self._ready = None

    @property
    def model_fingerprint(self) -> bytes:
        """The fingerprint of the current model, or empty before a replica has connected."""
        return self._model.fingerprint

    @property
    def num_ready(self) -> int:
        return len(self.ready())

    def not_ready(self) -> dict[str, str]:
        return {
            replica.address: replica.reason for replica in self.replicas if not replica.is_ready
        }

    def why_not_ready(self) -> str:
        if self.num_ready:
            return ""
        states = ", ".join(f"{address} ({why})" for address, why in self.not_ready().items())
        return f"no replica is ready: {states or 'none is known'}"

    def limits(self) -> ModelLimits:
        """Returns `known_limits`. Raises Unavailable if no replica has been ready so far."""
        if self.known_limits is None:
            raise no_replica_ready(self.why_not_ready())
        return self.known_limits

    async def until_limits(self) -> None:
        """Waits at most `patience_seconds` for the limits of the first ready replica."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_seconds):
                await self._has_limits.wait()

    def give_up(self) -> None:
        """Ends all waits of `until_limits`."""
        self._has_limits.set()

    def max_model_len(self) -> int | None:
        """The model's context length, or None while no replica is ready."""
        return self.limits().max_model_len if self.num_ready else None

    def update(self) -> bool:
        """Compares the replicas' models, and updates `known_limits`. Returns whether the current
        model was replaced. The limits of a new model apply even before a replica is ready.
        """
        was_replaced = self._model.compare(self.replicas)
        self.readiness_changed()
        limits = [
            replica.limits
            for replica in self.replicas
            if replica.limits is not None
            and (replica.is_ready or (was_replaced and not replica.refusal))
        ]
        if limits:
            self.known_limits = tightest_limits(limits)
            self._has_limits.set()
        self.changed.set()
        return was_replaced

    def _join(self, address: str) -> None:
        replica = Replica(address, self._links.make(address), self._clock, self._listener)
        self.replicas = [*self.replicas, replica]
        self._by_address[address] = replica
        self.readiness_changed()
        self._links.open(replica)
        self.changed.set()

    def _remove_leaving(self) -> bool:
        named = {address for addresses in self._addresses.values() for address in addresses}
        leaving = [r for r in self.replicas if r.address not in named and _has_ended(r)]
        for replica in leaving:
            logger.info(
                "scheduler %s is removed: no source lists the scheduler; last state: %s",
                replica.address,
                replica.reason,
            )
            self.replicas = [one for one in self.replicas if one is not replica]
            del self._by_address[replica.address]
            self.readiness_changed()
            self._links.close(replica)
            self._model.left(replica)
        return bool(leaving)


def _has_ended(replica: Replica) -> bool:
    """Whether the replica has no session, and is assumed not to open another one."""
    seconds = replica.seconds_disconnected()
    return seconds is not None and (replica.is_draining or seconds >= LEAVE_AFTER_SECONDS)


def no_replica_ready(why: str) -> Unavailable:
    return Unavailable(why, reason="NO_REPLICA_READY", retry_after_seconds=1.0)
