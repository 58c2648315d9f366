"""The KV blocks of sequences that were recently sent to a replica. These blocks will soon be
cached, although the replica's pool may not have reported them yet.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

MIN_SECONDS = 2.0
"""After a sequence is sent, its blocks are assumed to be cached for at least this number of seconds
and at most twice this number.
"""


class RecentPrefixes:
    """The keys of the blocks of sequences that were recently sent to one replica. There are two
    sets of keys, so that no key needs a timer. Keys are added to the newer set. At each multiple of
    MIN_SECONDS, the older set is dropped, the newer set becomes the older set, and an empty set
    becomes the newer set. Assuming for two seconds that blocks are cached is an idea of llm-d.
    """

    def __init__(self) -> None:
        self._newer: set[int] = set()
        self._older: set[int] = set()
        self._turns_at = MIN_SECONDS

    def add(self, keys: Sequence[int], now_seconds: float, known_depth: int = 0) -> None:
        """Adds the keys of a sent sequence's blocks, without the first `known_depth` blocks, which
        are known to be cached.
        """
        if now_seconds >= self._turns_at:
            self._turn(now_seconds)
        self._newer.update(keys[known_depth:])

    def depth(self, keys: Sequence[int], now_seconds: float, known_depth: int = 0) -> int:
        """Returns the number of leading blocks of a prompt that are cached or were sent recently.
        The first `known_depth` blocks are known to be cached. Bisection finds the last block that
        was sent, because all blocks before a sent block were also sent. Often the first lookup, of
        the block after the known blocks, shows that no further block was sent.
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
        """Drops all keys. Called when the session with the replica has ended."""
        self._newer, self._older = set(), set()

    def _turn(self, now_seconds: float) -> None:
        self._older = self._newer if now_seconds < self._turns_at + MIN_SECONDS else set()
        self._newer = set()
        self._turns_at = next_turn(now_seconds)


class RecentReplicas:
    """Maps the key of a prompt's first block to the addresses of the replicas to which sequences
    with this first block were recently sent. Keys are dropped at the times of `RecentPrefixes`.
    """

    def __init__(self) -> None:
        self._newer: dict[int, set[str]] = {}
        self._older: dict[int, set[str]] = {}
        self._turns_at = MIN_SECONDS

    def add(self, key: int, address: str, now_seconds: float) -> None:
        self._turn(now_seconds)
        self._newer.setdefault(key, set()).add(address)

    def addresses(self, key: int, now_seconds: float) -> Iterable[str]:
        """Returns the addresses for the first block `key`. An address may occur twice."""
        self._turn(now_seconds)
        return chain(self._newer.get(key, ()), self._older.get(key, ()))

    def _turn(self, now_seconds: float) -> None:
        if now_seconds >= self._turns_at:
            self._older = self._newer if now_seconds < self._turns_at + MIN_SECONDS else {}
            self._newer = {}
            self._turns_at = next_turn(now_seconds)


def next_turn(now_seconds: float) -> float:
    return (now_seconds // MIN_SECONDS + 1) * MIN_SECONDS
