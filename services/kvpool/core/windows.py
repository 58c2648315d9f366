"""Sliding windows and chunked local attention, which free blocks that no later query can see."""

from collections.abc import Sequence

from services.kvpool.core.group_manager import GroupManager


class SlidingWindowManager(GroupManager):
    """Manages the tables of a group in which a request keeps the blocks of the last window. A block
    is published only if it lies in the window before a possible end of a hit. If groups have
    different block sizes, some blocks lie in no such window. With sparse retention, most blocks lie
    in no such window.
    """

    def _keeps(self, positions: range, boundaries: Sequence[int]) -> list[bool] | None:
        begin, end = positions.start, positions.stop
        size, interval = self._block_size, self._retention_interval
        if self._alignment % size:
            return None
        # If the last block of a hit is dropped, a window ends one block after the hit.
        shift = int(self._uses_eagle)
        num_wanted = -(-(self._spec.window - 1) // size) + shift
        kept = [False] * (end - begin)
        if interval != 0:
            period = (interval or self._alignment) // size
            if num_wanted >= period:
                return None
            for position in range(max(begin, shift), end):
                kept[position - begin] = (position - shift) % period >= period - num_wanted
        if interval is not None:
            for boundary in boundaries:
                last = boundary // self._alignment * self._alignment // size + shift
                for position in range(max(begin, last - num_wanted), min(end, last)):
                    kept[position - begin] = True
        return kept


class ChunkedLocalManager(GroupManager):
    """Manages the tables of a group in which a request keeps the blocks of its current chunk."""
