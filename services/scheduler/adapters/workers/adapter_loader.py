"""Decides which adapters the workers load and unload.

A LoRA adapter is loaded when the first request that needs it arrives. Until then the request waits,
and other requests may overtake it. After a restart of workers, adapters are loaded again. If no
slot is free for an adapter, the least recently requested adapter is unloaded, among those that no
running or admissible request uses.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from services.common.errors import FailedPrecondition, InvalidArgument, StepwellError
from services.common.request.adapter import Adapter
from services.scheduler.core.request import Request

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
"""Seconds between attempts to find a free slot for an adapter, or to reach lost workers."""


class AdapterWorkers(Protocol):
    async def load_adapter(self, adapter: Adapter, kept: Sequence[bytes]) -> None:
        """Makes every worker load an adapter, and unload all adapters whose digests are not in
        `kept`. Raises InvalidArgument if the workers cannot serve the adapter, FailedPrecondition
        if its files have changed, and another StepwellError if a worker fails.
        """


class AdapterLoader:
    """Keeps up to `max_cpu_loras` adapters loaded. `unfinished` returns the unfinished requests."""

    def __init__(
        self,
        workers: AdapterWorkers,
        max_cpu_loras: int,
        unfinished: Callable[[], Iterable[Request]],
        failed: Callable[[Request, str], None],
    ) -> None:
        """Calls `failed` with a request whose adapter new workers cannot load, and the error."""
        self.lacks_slot = False
        """Whether an adapter is not loaded because unfinished requests use all loaded adapters."""
        self._workers = workers
        self._max_cpu_loras = max_cpu_loras
        self._unfinished = unfinished
        self._failed = failed
        self._loaded: OrderedDict[bytes, Adapter] = OrderedDict()
        """Maps digests to loaded adapters. The least recently requested adapter is first."""
        self._loading: dict[bytes, Adapter] = {}
        """Maps the digest of the adapter that is being loaded to the adapter. `reload` loads it on
        new workers, too, because the workers that were replaced may have loaded it already.
        """
        self._claims: Counter[bytes] = Counter()
        """Maps an adapter's digest to the number of requests that wait for the adapter."""
        self._turn = asyncio.Lock()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Maps an adapter's digest to a lock, which the request that loads the adapter holds. Other
        requests for the adapter wait for this lock. If they waited for `_turn`, they might wait for
        themselves, because the holder of `_turn` waits until running requests free a slot.
        """

    def is_loaded(self, digest: bytes) -> bool:
        """Whether an adapter is loaded. Counts as a request for the adapter."""
        if digest in self._loaded:
            self._loaded.move_to_end(digest)
        return digest in self._loaded

    async def load_for(self, request: Request, adapter: Adapter) -> str:
        """Waits until the request's adapter is loaded. Returns an error, or an empty string."""
        self._claims[adapter.digest] += 1
        try:
            while not request.is_finished:
                try:
                    await self._load(adapter, lambda: request.is_finished)
                    return ""
                except (InvalidArgument, FailedPrecondition) as refusal:
                    return f"the adapter {adapter.name!r} cannot be loaded: {refusal.message}"
                except StepwellError as failure:
                    logger.info(
                        "loading an adapter is tried again, because a worker did not load it: %s",
                        failure.message,
                    )
                    await asyncio.sleep(_RETRY_SECONDS)
            return ""
        finally:
            request.awaits_adapter = False
            self._claims -= Counter([adapter.digest])

    async def load(self, adapter: Adapter) -> None:
        """Loads an adapter before any request needs it. Raises StepwellError if that fails."""
        if not self._max_cpu_loras:
            raise InvalidArgument(
                "the replica's workers serve no adapters: start them with --enable-lora",
                field="adapter",
            )
        await self._load(adapter, lambda: False)

    async def reload(self) -> None:
        """Loads all adapters again, because workers were restarted. If a worker is lost meanwhile,
        this raises StepwellError and must be called again.
        """
        for adapter in [*self._loaded.values(), *self._loading.values()]:
            kept = [*self._loaded, *self._loading]
            if adapter.digest not in kept:  # unloaded since the loop began
                continue
            try:
                await self._workers.load_adapter(adapter, kept)
            except (InvalidArgument, FailedPrecondition) as refusal:
                logger.warning(
                    "the adapter %s is no longer served, because a restarted worker cannot load "
                    "it: %s",
                    adapter.name,
                    refusal.message,
                )
                self._loaded.pop(adapter.digest, None)
                for request in self._unfinished():
                    if request.adapter_digest == adapter.digest and not request.awaits_adapter:
                        self._failed(request, refusal.message)

    async def _load(self, adapter: Adapter, is_over: Callable[[], bool]) -> None:
        async with self._locks.setdefault(adapter.digest, asyncio.Lock()):
            if self.is_loaded(adapter.digest):
                return
            async with self._turn:
                try:
                    while not self._make_room():
                        self.lacks_slot = True
                        await asyncio.sleep(_RETRY_SECONDS)
                        if is_over():
                            return
                finally:
                    self.lacks_slot = False
                self._loading[adapter.digest] = adapter
                try:
                    await self._workers.load_adapter(adapter, list(self._loaded))
                    self._loaded[adapter.digest] = adapter
                finally:
                    del self._loading[adapter.digest]

    def _make_room(self) -> bool:
        """Unloads an adapter if no slot is free. Returns False if all adapters are in use."""
        if len(self._loaded) < self._max_cpu_loras:
            return True
        used = {one.adapter_digest for one in self._unfinished() if not one.awaits_adapter}
        unused = (x for x in self._loaded if x not in used and not self._claims[x])
        victim = next(unused, None)
        if victim is not None:
            del self._loaded[victim]
        return victim is not None
