"""The replicas in order of their loads, so that a policy need not examine all of them."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial

from services.gateway.core.fleet.load_tracker import INITIAL_MEAN_OUTPUT_TOKENS, Speeds, mean_speeds
from services.gateway.core.fleet.replica import Replica

Entry = tuple[float, int]
"""A replica's number of recently computed tokens (`LoadTracker.recent_weight`), and the replica's
index in the list of replicas.
"""


class LoadOrder:
    """Replicas in order of their numbers of requests. Replicas with equal numbers are in order of
    their numbers of recently computed tokens. The object is valid for one era (a period in which
    the weights of tokens are comparable, see `load_tracker.Era`).
    """

    def __init__(self, replicas: Sequence[Replica], era_number: int) -> None:
        self.replicas = replicas
        self.era_number = era_number
        self.index_of = {replica.address: index for index, replica in enumerate(replicas)}
        self.index_of_node = {
            replica.description.cache_node: index
            for index, replica in enumerate(replicas)
            if replica.description is not None
        }
        self.fleet_speeds = self.least_speeds = mean_speeds(())
        """The replicas' mean speeds, and lower bounds of their speeds."""
        self.least_output_tokens = INITIAL_MEAN_OUTPUT_TOKENS
        """A lower bound of the replicas' mean numbers of output tokens."""
        self._has_equal_speeds = True
        self._speeds: list[Speeds | None] = [None] * len(replicas)
        self._num_requests = [0] * len(replicas)
        self._weights = [0.0] * len(replicas)
        self._sum_of_weights = Fraction(0)
        """The sum of `_weights`, as an exact fraction so that rounding errors do not accumulate."""
        self._with_tokens_only: set[int] = set()
        """Indices of the replicas without requests whose last report has uncomputed tokens."""
        self._levels: dict[int, list[Entry]] = {0: [(0.0, i) for i in range(len(replicas))]}
        """Maps a number of requests to the sorted entries of the replicas with this number."""
        self._changed = set(range(len(replicas)))
        self.update()

    def follow(self) -> None:
        """From now on, records which replicas change, so that `update` moves only those. Only one
        LoadOrder can follow a replica.
        """
        for index, replica in enumerate(self.replicas):
            replica.load.on_changed = partial(self._changed.add, index)

    def update(self) -> None:
        """Moves the replicas that have changed since the last call to their new positions."""
        has_new_speeds = False
        for index in self._changed:
            load = self.replicas[index].load
            self._move(index, load.num_requests, load.recent_weight(self.era_number))
            if load.num_uncomputed_tokens and not load.num_requests:
                self._with_tokens_only.add(index)
            else:
                self._with_tokens_only.discard(index)
            self.least_output_tokens = min(self.least_output_tokens, load.mean_output_tokens)
            if load.speeds is not self._speeds[index]:
                self._speeds[index], has_new_speeds = load.speeds, True
        self._changed.clear()
        if has_new_speeds:
            known = [speeds for speeds in self._speeds if speeds is not None]
            self.fleet_speeds = fleet = mean_speeds(known)
            self.least_speeds = Speeds(
                *map(min, zip(fleet.values, *(speeds.values for speeds in known), strict=True))
            )
            self._has_equal_speeds = all(speeds == self._speeds[0] for speeds in self._speeds)

    @property
    def least(self) -> int:
        """The number of requests of the least loaded replica."""
        return min(self._levels)

    @property
    def mean_weight(self) -> float:
        """The mean number of recently computed tokens (`recent_weight`) of the replicas."""
        return float(self._sum_of_weights) / len(self._weights)

    @property
    def idle_speeds(self) -> Speeds | None:
        """The speeds of every replica, if all replicas have equal speeds and no replica without
        requests has uncomputed tokens. Then a sequence's costs at replicas without requests and
        without cached blocks differ only by the replicas' numbers of recently computed tokens. In
        any other case it is None.
        """
        if self._has_equal_speeds and not self._with_tokens_only:
            return self._speeds[0] or self.fleet_speeds
        return None

    def levels(self, max_num_requests: int) -> Iterator[tuple[int, Sequence[Entry]]]:
        """Yields each number of requests up to a limit with the entries of the replicas that have
        this number, both in ascending order.
        """
        for num_requests in sorted(self._levels):
            if num_requests > max_num_requests:
                return
            yield num_requests, self._levels[num_requests]

    def _move(self, index: int, num_requests: int, weight: float) -> None:
        before = self._levels[self._num_requests[index]]
        del before[bisect_left(before, (self._weights[index], index))]
        if not before:
            del self._levels[self._num_requests[index]]
        insort(self._levels.setdefault(num_requests, []), (weight, index))
        if weight != self._weights[index]:
            self._sum_of_weights += Fraction(weight) - Fraction(self._weights[index])
        self._num_requests[index], self._weights[index] = num_requests, weight
