"""Operators' calls to replicas, all of them or some, and the answer of each."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.errors import NotFound, StepwellError, Unavailable
from services.common.replica.pause_mode import PauseMode
from services.common.request.adapter import Adapter


class ReplicaAdmin(Protocol):
    """The way to one scheduler for operators. Every call raises StepwellError."""

    address: str

    async def pause(self, mode: PauseMode, timeout_seconds: float) -> None:
        """Returns once no step runs. DeadlineExceeded leaves the pause as it is."""

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def reset_prefix_cache(
        self, *, preempt_running: bool, reset_connector: bool = False
    ) -> None:
        """FailedPrecondition while requests hold blocks, unless they are preempted."""

    async def drain(self) -> int:
        """Refuses new requests; returns how many run or wait there still."""

    async def undrain(self) -> None: ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """InvalidArgument if its workers cannot serve it."""


Said = Mapping[str, bool | int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call at one replica: its answer, `said`, or the `error`."""

    address: str
    said: Said = field(default_factory=dict)
    error: StepwellError | None = None


class Administration:
    """Asks the replicas of a fleet at the same time. One that fails does not keep the others from
    doing what was asked.
    """

    def __init__(self, replicas: Callable[[], Sequence[ReplicaAdmin]]) -> None:
        """`replicas` are those that there are at the time of a call."""
        self._replicas = replicas

    async def pause(
        self,
        addresses: Sequence[str],
        mode: PauseMode,
        *,
        clear_cache: bool,
        timeout_seconds: float,
    ) -> list[Outcome]:
        """Pauses the engines, and then forgets what they have cached where that is wanted."""

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
        """Has every replica load an adapter."""

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
        """The replicas of these addresses, or all without any. Raises NotFound, before any is
        asked, for an address that is none's, and Unavailable where there are no replicas.
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
