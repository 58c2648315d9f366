"""Loads offloaded KV blocks from the tier of host memory in a thread, while steps run."""

import queue
import threading
from collections.abc import Callable, Sequence

from services.worker.backends.arrays import Int32Array
from services.worker.core.step import EndedTierLoad, TierBlocks, TierLoad

IDLE_WAIT_SECONDS = 0.005
"""Maximum time that a step without tokens waits for a load to end. Without this wait, repeated
empty steps would slow the load down. The wait delays a request that arrives during it.
"""


class LoadThread:
    """Runs loads one after the other. Its methods are called by the thread that runs steps."""

    def __init__(self, load: Callable[[TierBlocks], Int32Array]) -> None:
        """`load` copies blocks, and returns the target blocks that were not loaded."""
        self._load = load
        self._loads: queue.SimpleQueue[TierLoad] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_loading = 0
        self._ended: list[EndedTierLoad] = []
        threading.Thread(target=self._load_all, name="KV tier", daemon=True).start()

    def begin(self, loads: Sequence[TierLoad]) -> None:
        with self._changed:
            self._num_loading += len(loads)
        for load in loads:
            self._loads.put(load)

    def take_ended(self, *, is_idle: bool) -> tuple[EndedTierLoad, ...]:
        """Returns ended loads. If there are none and `is_idle`, waits up to IDLE_WAIT_SECONDS."""
        if not self._num_loading and not self._ended:
            return ()
        with self._changed:
            if is_idle and not self._ended:
                self._changed.wait(IDLE_WAIT_SECONDS)
            ended, self._ended = tuple(self._ended), []
        return ended

    def reset(self) -> None:
        """Waits until all loads have ended, and drops their results."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_loading)
            self._ended = []

    def _load_all(self) -> None:
        while True:
            load = self._loads.get()
            invalid = self._load(load.blocks)
            with self._changed:
                self._num_loading -= 1
                self._ended.append(EndedTierLoad(load.request, invalid))
                self._changed.notify_all()
