"""Sliding windows and chunked local attention: blocks that no later query sees are freed."""

from collections.abc import Sequence

from services.kvpool.core.group_manager import GroupManager


class SlidingWindowManager(GroupManager):
    """A request holds the blocks of the last window.

    Published are those in which the window before a possible end of a hit lies: with blocks of
    several sizes not every block, and with sparse retention few of them.
    """

    def _keeps(self, positions: range, boundaries: Sequence[int]) -> list[bool] | None:
        begin, end = positions.start, positions.stop
        size, interval = self._block_size, self._retention_interval
        if self._alignment % size:
            return None
        # Where the last block of a hit is dropped, a window ends one block behind the hit.
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
    """A request holds the blocks of its last token's chunk."""
