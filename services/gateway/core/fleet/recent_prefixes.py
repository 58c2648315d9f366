"""Blocks that were sent to a replica lately, which its pool may not have reported yet."""

from collections.abc import Sequence

MIN_SECONDS = 2.0
"""Blocks that were sent are expected to be cached for at least this time, and at most twice."""


class RecentPrefixes:
    """Keys of the blocks of the sequences that were sent to one replica lately.

    Two sets take turns, so that no entry needs a timer. Speculative entries of two seconds are
    llm-d's.
    """

    def __init__(self) -> None:
        self._newer: set[int] = set()
        self._older: set[int] = set()
        self._turned_at = 0.0

    def add(self, keys: Sequence[int], now_seconds: float, known_depth: int = 0) -> None:
        """A sequence with the blocks of these keys was sent. Those of the first `known_depth` are
        known to be cached: they are not kept here, which costs more than looking all of them up.
        """
        self._turn(now_seconds)
        self._newer.update(keys[known_depth:])

    def depth(self, keys: Sequence[int], now_seconds: float, known_depth: int = 0) -> int:
        """How many blocks of a chain, from the first on, are cached or were sent lately, if the
        first `known_depth` are cached.

        A chain of which a block was sent was sent up to there, so that one look at the block after
        the known ones mostly suffices, and bisection finds the end.
        """
        if now_seconds - self._turned_at >= MIN_SECONDS:
            self._turn(now_seconds)
        newer, older = self._newer, self._older
        low, high = known_depth, len(keys)
        if low == high or (keys[low] not in newer and keys[low] not in older):
            return known_depth
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in newer or keys[middle] in older:
                low = middle + 1
            else:
                high = middle
        return low

    def clear(self) -> None:
        """Forgets all keys, since the replica lost what it had cached."""
        self._newer, self._older = set(), set()

    def _turn(self, now_seconds: float) -> None:
        passed = now_seconds - self._turned_at
        if passed >= MIN_SECONDS:
            self._older = self._newer if passed < 2 * MIN_SECONDS else set()
            self._newer = set()
            self._turned_at = now_seconds
