"""Statistics of the pauses of agents' programs. A program pauses between two requests while a tool
runs. The pauses of each tool show how likely it is that a program returns soon.
"""

import math
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

_NUM_KEPT = 400
_LEAST = 10
"""A tool's pauses are used only if this number of them is known."""
_REFRESH = 10
"""Number of new pauses of a tool after which its indexes (see `PausesOfTool`) are out of date."""
_PER_DOUBLING = 4
"""Number of pause lengths, for each doubling of the length, for which an index is computed."""
_MAX_TOOLS = 1024
"""Limit on the number of pairs of tenant and tool whose pauses are stored."""
_USUAL_SHARE = 0.95
"""The fraction of returning programs that return within the usual time of a tool."""
NEVER = math.inf
"""The length of a pause whose program never returned."""


class PauseStatistics:
    """The lengths, in seconds, of the latest pauses of each tool."""

    def __init__(self) -> None:
        self._of_tool: OrderedDict[tuple[bytes | None, str], PausesOfTool] = OrderedDict()
        """Maps tenant (None: all) and tool to pauses, the least recently used pair first."""
        self._all = PausesOfTool()
        self._used_for: dict[tuple[bytes, str], PausesOfTool | None] = {}
        """Results of `_of`. Emptied when a number of pauses changes."""

    def ended(self, tenant: bytes, tool: str, seconds: float) -> None:
        """Adds an ended pause. Its length is NEVER if the program is presumed to have ended."""
        self._used_for.clear()
        for key in ((tenant, tool), (None, tool)):
            pauses = self._of_tool.get(key)
            if pauses is None:
                pauses = self._of_tool[key] = PausesOfTool()
            self._of_tool.move_to_end(key)
            pauses.add(seconds)
        while len(self._of_tool) > _MAX_TOOLS:
            self._of_tool.popitem(last=False)
        self._all.add(seconds)

    def note_ongoing(self, pauses: Iterable[tuple[bytes, str, float]]) -> None:
        """Sets the pauses that have not ended: tenant, tool, and seconds so far. They are counted
        so that it is soon recognized if programs rarely return after a tool.
        """
        self._used_for.clear()
        ongoing = defaultdict[tuple[bytes | None, str], list[float]](list)
        for tenant, tool, seconds in pauses:
            ongoing[tenant, tool].append(seconds)
            ongoing[None, tool].append(seconds)
        for key in list(islice(ongoing, _MAX_TOOLS)):
            self._of_tool.setdefault(key, PausesOfTool())
        for key, of_tool in self._of_tool.items():
            of_tool.note_ongoing(ongoing.get(key, ()))

    def index(self, tenant: bytes, tool: str, age: float) -> float:
        """The value, in 1 / second, of keeping a context (KV blocks for a program's next request)
        that has paused for `age` seconds (see `PausesOfTool.index`). Uses the tenant's pauses of
        the tool. If these are too few, uses the tool's pauses of all tenants, or else all pauses,
        or else returns 1 / (age + 1).
        """
        pauses = self._of(tenant, tool)
        return 1 / (age + 1) if pauses is None else pauses.index(age)

    def best(self, tenant: bytes, tool: str, age: float) -> tuple[float, float]:
        """The probability of a return within t, and t, the time that maximizes `index`."""
        pauses = self._of(tenant, tool)
        if pauses is None:
            return 1.0, age + 1
        _, chance, seconds = pauses.best(age)
        return chance, seconds

    def is_unusual(self, tenant: bytes, tool: str, age: float) -> bool:
        """Whether a pause is over twice as long as 95 % of the tool's pauses with a return."""
        pauses = self._of(tenant, tool)
        return pauses is not None and age > 2 * pauses.usual

    def _of(self, tenant: bytes, tool: str) -> "PausesOfTool | None":
        key = tenant, tool
        if key not in self._used_for:
            candidates = self._of_tool.get(key), self._of_tool.get((None, tool)), self._all
            known = (one for one in candidates if one is not None and len(one) >= _LEAST)
            self._used_for[key] = next(known, None)
        return self._used_for[key]


class PausesOfTool:
    """The lengths of the latest pauses of one tool."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_NUM_KEPT)
        self._ongoing: Sequence[float] = ()
        """The lengths so far, in seconds, of ongoing pauses."""
        self._num_new = 0
        """The number of pauses that ended after `_sorted` was computed."""
        self._sorted: SortedPauses | None = None
        """The pauses for which indexes are computed. None if they are out of date."""
        self._indexes: dict[int, float] = {}
        """The indexes of `_sorted`, by the number of the pause length (see `_PER_DOUBLING`)."""
        self._usual: float | None = None

    def __len__(self) -> int:
        return len(self._latest) + len(self._ongoing)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self._num_new += 1
        self._usual = None

    def note_ongoing(self, seconds: Sequence[float]) -> None:
        if seconds or self._ongoing:
            self._ongoing, self._sorted = seconds[-_NUM_KEPT:], None

    @property
    def usual(self) -> float:
        """The seconds within which 95 of 100 returns occurred. NEVER if under ten are known."""
        if self._usual is None:
            returned = sorted(one for one in self._latest if one != NEVER)
            few = len(returned) < _LEAST
            self._usual = NEVER if few else returned[int(_USUAL_SHARE * len(returned))]
        return self._usual

    def index(self, age: float) -> float:
        """The value, in 1 / second, of keeping a context (KV blocks for a program's next request)
        whose pause has lasted for `age` seconds.

        This is Gittins's index: the maximum, over all times t, of P(the program returns within t) /
        E[seconds of the pause within t] (J. C. Gittins, "Bandit processes and dynamic allocation
        indices", 1979). Ages are rounded down to a few values, so that indexes can be stored.
        """
        pauses = self._up_to_date()
        step = math.floor(_PER_DOUBLING * math.log2(age + 0.01))
        found = self._indexes.get(step)
        if found is None:
            age = max(0.0, 2 ** (step / _PER_DOUBLING) - 0.01)
            found = self._indexes[step] = pauses.best(age)[0]
        return found

    def best(self, age: float) -> tuple[float, float, float]:
        """See `SortedPauses.best`."""
        return self._up_to_date().best(age)

    def _up_to_date(self) -> "SortedPauses":
        if self._sorted is None or self._num_new >= _REFRESH:
            self._sorted = SortedPauses(self._latest, self._ongoing)
            self._indexes, self._num_new = {}, 0
        return self._sorted


class SortedPauses:
    """Sorted lengths of pauses, from which the index of any age is computed without sorting."""

    def __init__(self, ended: Iterable[float], ongoing: Iterable[float]) -> None:
        """`ended` contains NEVER for a program that did not return. An ongoing pause counts with
        its length so far, and without a return.
        """
        pauses = sorted([*((one, 1) for one in ended), *((one, 0) for one in ongoing)])
        self._num_pauses = len(pauses)
        finite = pauses[: bisect_left(pauses, (NEVER, 0))]
        self._lengths = [seconds for seconds, _ in finite]
        self._num_returned = [0, *accumulate(returned for _, returned in finite)]
        """The number of returns among the first pauses: none, one, two, and so on."""

    def best(self, age: float) -> tuple[float, float, float]:
        """The index at this age, the probability of a return within t, and t, the time that
        maximizes the index. One more return after 2 * age + 1 seconds is assumed, so that the index
        is above 0 even if all known pauses were shorter than `age`.
        """
        assumed = 2 * age + 1
        first, middle = bisect_right(self._lengths, age), bisect_left(self._lengths, assumed)
        num_left, before = self._num_pauses - first + 1, self._num_returned[first]
        left = [seconds - age for seconds in self._lengths[first:middle]]
        left.append(age + 1)
        left += [seconds - age for seconds in self._lengths[middle:]]
        returned = [number - before for number in self._num_returned[first + 1 : middle + 1]]
        returned += [number - before + 1 for number in self._num_returned[middle:]]
        passed = accumulate(left)
        others = range(num_left - 1, -1, -1)
        indexes = [
            number / (seconds + num_others * longest)
            for number, seconds, num_others, longest in zip(
                returned, passed, others, left, strict=False
            )
        ]
        index = max(indexes)
        place = indexes.index(index)
        return index, returned[place] / num_left, left[place]
