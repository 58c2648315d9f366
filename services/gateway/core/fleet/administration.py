"""Operators' calls, such as pausing, to some or all replicas. Each replica has its own result."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.errors import NotFound, StepwellError, Unavailable
from services.common.replica.pause_mode import PauseMode
from services.common.request.adapter import Adapter


class ReplicaAdmin(Protocol):
    """Operators' calls to the scheduler of one replica. Every method may raise StepwellError."""

    address: str

    async def pause(self, mode: PauseMode, timeout_seconds: float) -> None:
        """Makes the scheduler run no more steps, and returns when no step runs. Raises
        DeadlineExceeded if a step still runs after `timeout_seconds`. The pause stays in effect.
        """

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def reset_prefix_cache(
        self, *, preempt_running: bool, reset_connector: bool = False
    ) -> None:
        """Raises FailedPrecondition if requests have KV blocks and `preempt_running` is false."""

    async def drain(self) -> int:
        """Makes the scheduler refuse new requests. Returns the number of unfinished requests."""

    async def undrain(self) -> None: ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Raises InvalidArgument if the workers cannot serve the adapter."""


Said = Mapping[str, bool | int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call to one replica: the values `said` that it returned, or an `error`."""

    address: str
    said: Said = field(default_factory=dict)
    error: StepwellError | None = None


class Administration:
    """Calls several replicas concurrently. A failure at one replica does not affect the others."""

    def __init__(self, replicas: Callable[[], Sequence[ReplicaAdmin]]) -> None:
        self._replicas = replicas

    async def pause(
        self,
        addresses: Sequence[str],
        mode: PauseMode,
        *,
        clear_cache: bool,
        timeout_seconds: float,
    ) -> list[Outcome]:
        """Pauses the schedulers of the replicas. If `clear_cache` is true, then also resets the
        replicas' prefix caches.
        """

        async def pause(replica: ReplicaAdmin) -> Said:
            await replica.pause(mode, timeout_seconds)
            if clear_cache:
                await replica.reset_prefix_cache(preempt_running=False)
            return {}

        return await self._ask(addresses, pause)

    async def resume(self, addresses: Sequence[str]) -> list[Outcome]:
        async def resume(replica: ReplicaAdmin) -> Said:
            await replica.resume()
            return {}

        return await self._ask(addresses, resume)

    async def is_paused(self, addresses: Sequence[str]) -> list[Outcome]:
        async def is_paused(replica: ReplicaAdmin) -> Said:
            return {"is_paused": await replica.is_paused()}

        return await self._ask(addresses, is_paused)

    async def reset_prefix_cache(
        self, addresses: Sequence[str], *, preempt_running: bool, reset_connector: bool
    ) -> list[Outcome]:
        async def reset(replica: ReplicaAdmin) -> Said:
            await replica.reset_prefix_cache(
                preempt_running=preempt_running, reset_connector=reset_connector
            )
            return {}

        return await self._ask(addresses, reset)

    async def drain(self, addresses: Sequence[str]) -> list[Outcome]:
        async def drain(replica: ReplicaAdmin) -> Said:
            return {"num_unfinished": await replica.drain()}

        return await self._ask(addresses, drain)

    async def undrain(self, addresses: Sequence[str]) -> list[Outcome]:
        async def undrain(replica: ReplicaAdmin) -> Said:
            await replica.undrain()
            return {}

        return await self._ask(addresses, undrain)

    async def load_adapter(self, adapter: Adapter) -> list[Outcome]:
        async def load(replica: ReplicaAdmin) -> Said:
            await replica.load_adapter(adapter)
            return {}

        return await self._ask((), load)

    async def _ask(
        self, addresses: Sequence[str], call: Callable[[ReplicaAdmin], Awaitable[Said]]
    ) -> list[Outcome]:
        async def ask(replica: ReplicaAdmin) -> Outcome:
            try:
                return Outcome(replica.address, await call(replica))
            except StepwellError as error:
                return Outcome(replica.address, error=error)

        return await asyncio.gather(*map(ask, self._chosen(addresses)))

    def _chosen(self, addresses: Sequence[str]) -> list[ReplicaAdmin]:
        """Returns the replicas at these addresses, or all replicas if `addresses` is empty. Raises
        NotFound if an address is unknown, and Unavailable if there are no replicas.
        """
        known = {replica.address: replica for replica in self._replicas()}
        if not known:
            raise Unavailable("there are no replicas", reason="NO_REPLICAS")
        unknown = [address for address in addresses if address not in known]
        if unknown:
            raise NotFound(
                f"there is no replica {unknown[0][:200]!r}; there are {', '.join(known)}",
                field="replica",
                reason="REPLICA_NOT_FOUND",
            )
        return [known[address] for address in dict.fromkeys(addresses or known)]
