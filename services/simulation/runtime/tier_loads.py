"""Simulates loads of KV blocks from the tier of host memory to which they are offloaded."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from services.worker.backends.arrays import Int32Array
from services.worker.core.kv.load_thread import IDLE_WAIT_SECONDS
from services.worker.core.step import EndedTierLoad, TierBlocks, TierLoad

_LOAD_SECONDS = 0.02, 0.3
"""Limits in seconds, one of which is drawn at random for each load's time."""


class VirtualLoads:
    """Replaces LoadThread. Loads run one after the other, and copy their blocks at the end."""

    def __init__(self, load: Callable[[TierBlocks], Int32Array]) -> None:
        self._load = load
        self._loads: deque[tuple[float, TierLoad]] = deque()
        """The loads that have not ended, each with the time of its end."""

    @property
    def targets(self) -> set[int]:
        """The blocks of the KV cache into which loads write."""
        return {block for _, load in self._loads for block in load.blocks.block_ids.tolist()}

    def begin(self, loads: Sequence[TierLoad]) -> None:
        for load in loads:
            begins = self._loads[-1][0] if self._loads else time.monotonic()
            seconds = random.choice(_LOAD_SECONDS) * random.random()
            self._loads.append((begins + seconds, load))

    def take_ended(self, *, is_idle: bool) -> tuple[EndedTierLoad, ...]:
        if is_idle and self._loads:
            time.sleep(min(IDLE_WAIT_SECONDS, max(0.0, self._loads[0][0] - time.monotonic())))
        ended = []
        while self._loads and self._loads[0][0] <= time.monotonic():
            ended.append(self._end_first())
        return tuple(ended)

    def reset(self) -> None:
        while self._loads:
            self._end_first()

    def _end_first(self) -> EndedTierLoad:
        _, load = self._loads.popleft()
        return EndedTierLoad(load.request, self._load(load.blocks))
