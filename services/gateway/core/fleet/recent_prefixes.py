"""The blocks of sequences that were recently sent to a replica. The replica's pool may not have
reported these blocks as cached yet.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

MIN_SECONDS = 2.0
"""Sent blocks are expected to be cached for at least this number of seconds, and at most twice as
long.
"""


class RecentPrefixes:
    """The keys of the blocks of sequences that were recently sent to one replica. Keys are added to
    a newer set. At each multiple of MIN_SECONDS the newer set becomes the older one, and the older
    set is dropped, so that no key needs a timer. The idea of expecting blocks for two seconds is
    from llm-d.
    """

    def __init__(self) -> None:
        self._newer: set[int] = set()
        self._older: set[int] = set()
        self._turns_at = MIN_SECONDS

    def add(self, keys: Sequence[int], now_seconds: float, known_depth: int = 0) -> None:
        """Adds the blocks of a sequence that was sent. The first `known_depth` blocks are known to
        be cached. They are not stored, since storing them costs more than looking them up.
        """
        if now_seconds >= self._turns_at:
            self._turn(now_seconds)
        self._newer.update(keys[known_depth:])

    def depth(self, keys: Sequence[int], now_seconds: float, known_depth: int = 0) -> int:
        """Returns the number of leading blocks of a chain that are cached or were sent recently.
        The first `known_depth` blocks are known to be cached. If a block of a chain was sent, all
        blocks before it were sent, too. So the end can be found by bisection, and mostly a lookup
        of the first unknown block suffices.
        """
        if now_seconds >= self._turns_at:
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
        """Drops all keys, after the replica lost its cache."""
        self._newer, self._older = set(), set()

    def _turn(self, now_seconds: float) -> None:
        self._older = self._newer if now_seconds < self._turns_at + MIN_SECONDS else set()
        self._newer = set()
        self._turns_at = next_turn(now_seconds)


class RecentReplicas:
    """The replicas to which sequences were recently sent, by the key of their first block. Keys are
    dropped at the times at which `RecentPrefixes` drops them.
    """

    def __init__(self) -> None:
        self._newer: dict[int, set[str]] = {}
        self._older: dict[int, set[str]] = {}
        self._turns_at = MIN_SECONDS

    def add(self, key: int, address: str, now_seconds: float) -> None:
        self._turn(now_seconds)
        self._newer.setdefault(key, set()).add(address)

    def addresses(self, key: int, now_seconds: float) -> Iterable[str]:
        """The replicas to which sequences with this key were recently sent, some of them twice."""
        self._turn(now_seconds)
        return chain(self._newer.get(key, ()), self._older.get(key, ()))

    def _turn(self, now_seconds: float) -> None:
        if now_seconds >= self._turns_at:
            self._older = self._newer if now_seconds < self._turns_at + MIN_SECONDS else {}
            self._newer = {}
            self._turns_at = next_turn(now_seconds)


def next_turn(now_seconds: float) -> float:
    """The next multiple of MIN_SECONDS."""
    return (now_seconds // MIN_SECONDS + 1) * MIN_SECONDS
