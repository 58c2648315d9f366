"""Statistics of the pauses of agents' programs. A program pauses between two requests while a tool
runs. The pauses of each tool show how likely it is that a program returns soon.
"""

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

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
        """The time t that maximizes `index`, and the probability that a program returns within t.
        Returns the probability first.
        """
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
        self._indexes: dict[int, float] = {}
        """The computed indexes, by the number of the pause length (see `_PER_DOUBLING`)."""
        self._usual: float | None = None

    def __len__(self) -> int:
        return len(self._latest) + len(self._ongoing)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self._num_new += 1
        self._usual = None

    def note_ongoing(self, seconds: Sequence[float]) -> None:
        if seconds or self._ongoing:
            self._ongoing, self._indexes = seconds[-_NUM_KEPT:], {}

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
        if not self._indexes or self._num_new >= _REFRESH:
            self._indexes, self._num_new = {}, 0
        step = math.floor(_PER_DOUBLING * math.log2(age + 0.01))
        found = self._indexes.get(step)
        if found is None:
            age = max(0.0, 2 ** (step / _PER_DOUBLING) - 0.01)
            found = self._indexes[step] = self.best(age)[0]
        return found

    def best(self, age: float) -> tuple[float, float, float]:
        """The index at this age, the time t that maximizes it, and the probability of a return
        within t, in the order index, probability, time. One more return after 2 * age + 1 seconds
        is assumed, so that the index is above 0 even if all known pauses were shorter than `age`. A
        pause that has not ended counts with its length so far, and without a return.
        """
        ended = [(one - age, True) for one in self._latest if one > age]
        ongoing = [(one - age, False) for one in self._ongoing if one > age]
        left = sorted([*ended, *ongoing, (age + 1, True)])
        best, passed_seconds, num_returned = (0.0, 0.0, 0.0), 0.0, 0
        for place, (seconds, returned) in enumerate(left):
            if seconds == NEVER:
                break
            passed_seconds += seconds
            num_returned += returned
            num_others = len(left) - place - 1
            index = num_returned / (passed_seconds + num_others * seconds)
            if index > best[0]:
                best = index, num_returned / len(left), seconds
        return best
