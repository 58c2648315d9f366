"""The adapters that the workers hold: which are loaded, and which make room for others.

The workers keep what they are told to keep. An adapter is loaded when the first request comes that
needs it, while the request waits and others overtake it, and again on workers that are new. It
stays until another one needs its place: the one that was asked for longest ago goes, of those that
no request has which runs or could.
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
"""Between attempts to find a place, or to reach workers that are away."""


class AdapterWorkers(Protocol):
    """All workers of a replica."""

    async def load_adapter(self, adapter: Adapter, kept: Sequence[bytes]) -> None:
        """Lets every worker load it, and forget those that are not kept. Raises StepwellError:
        InvalidArgument if it cannot be served, FailedPrecondition if its files have changed.
        """


class AdapterLoader:
    """Loads at most `max_cpu_loras` adapters at once. `unfinished`: requests that run or wait."""

    def __init__(
        self,
        workers: AdapterWorkers,
        max_cpu_loras: int,
        unfinished: Callable[[], Iterable[Request]],
        failed: Callable[[Request, str], None],
    ) -> None:
        """`failed` is called for each request whose adapter new workers cannot load, and why."""
        self._workers = workers
        self._max_cpu_loras = max_cpu_loras
        self._unfinished = unfinished
        self._failed = failed
        self._loaded: OrderedDict[bytes, Adapter] = OrderedDict()
        """By digest, those asked for longest ago first."""
        self._loading: dict[bytes, Adapter] = {}
        """The one that the workers are just told to load. New workers are told so, too: those that
        answer may be the ones before them.
        """
        self._claims: Counter[bytes] = Counter()
        """Requests that are about to use an adapter, or wait for it to be loaded."""
        self._turn = asyncio.Lock()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """By digest. Of the requests that need one adapter, one loads it: the others have it then,
        and do not wait for the turn of an adapter that finds no place while they claim theirs.
        """

    def is_loaded(self, digest: bytes) -> bool:
        """Whether a request can have an adapter at once; it counts as asked for."""
        if digest in self._loaded:
            self._loaded.move_to_end(digest)
        return digest in self._loaded

    async def load_for(self, request: Request, adapter: Adapter) -> str:
        """Returns when a request can have its adapter, or has ended; if it cannot, the reason."""
        self._claims[adapter.digest] += 1
        try:
            while not request.is_finished:
                try:
                    await self._load(adapter, lambda: request.is_finished)
                    return ""
                except (InvalidArgument, FailedPrecondition) as refusal:
                    return f"the adapter {adapter.name!r} cannot be loaded: {refusal.message}"
                except StepwellError as failure:
                    logger.info("an adapter is loaded later: %s", failure.message)
                    await asyncio.sleep(_RETRY_SECONDS)
            return ""
        finally:
            request.awaits_adapter = False
            self._claims -= Counter([adapter.digest])

    async def load(self, adapter: Adapter) -> None:
        """Loads an adapter that no request has yet. Raises StepwellError if the workers cannot."""
        if not self._max_cpu_loras:
            raise InvalidArgument("the replica serves no adapters: enable_lora", field="adapter")
        await self._load(adapter, lambda: False)

    async def reload(self) -> None:
        """Loads what was loaded on workers that are new. Raises StepwellError if one is away; then
        it is to be called again.
        """
        for adapter in [*self._loaded.values(), *self._loading.values()]:
            kept = [*self._loaded, *self._loading]
            if adapter.digest not in kept:  # it has made room meanwhile
                continue
            try:
                await self._workers.load_adapter(adapter, kept)
            except (InvalidArgument, FailedPrecondition) as refusal:
                logger.warning("the adapter %s is gone: %s", adapter.name, refusal.message)
                self._loaded.pop(adapter.digest, None)
                for request in self._unfinished():
                    if request.adapter_digest == adapter.digest and not request.awaits_adapter:
                        self._failed(request, refusal.message)

    async def _load(self, adapter: Adapter, is_over: Callable[[], bool]) -> None:
        async with self._locks.setdefault(adapter.digest, asyncio.Lock()):
            if self.is_loaded(adapter.digest):
                return
            async with self._turn:
                while not self._make_room():
                    await asyncio.sleep(_RETRY_SECONDS)
                    if is_over():
                        return
                self._loading[adapter.digest] = adapter
                try:
                    await self._workers.load_adapter(adapter, list(self._loaded))
                    self._loaded[adapter.digest] = adapter
                finally:
                    del self._loading[adapter.digest]

    def _make_room(self) -> bool:
        """Forgets an adapter if there is no place for one more; returns False if all are needed."""
        if len(self._loaded) < self._max_cpu_loras:
            return True
        used = {one.adapter_digest for one in self._unfinished() if not one.awaits_adapter}
        unused = (x for x in self._loaded if x not in used and not self._claims[x])
        victim = next(unused, None)
        if victim is not None:
            del self._loaded[victim]
        return victim is not None
