"""How long programs pause, by tool, and how likely it is that they return soon."""

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

_NUM_KEPT = 400
_LEAST = 10
"""Pauses of a tool that must be known before they are used."""
_REFRESH = 10
"""Pauses after which the index of a tool is computed anew."""
_PER_DOUBLING = 4
"""Number of ages, for each doubling, between which an index is not computed anew."""
_MAX_TOOLS = 1024
"""Tools, of all tenants, whose pauses are kept."""
NEVER = math.inf
"""The length of a pause whose program never returned."""


class PauseStatistics:
    """The lengths of the latest pauses of each tool, in seconds."""

    def __init__(self) -> None:
        self._of_tool: OrderedDict[tuple[bytes | None, str], PausesOfTool] = OrderedDict()
        """By tenant and tool, the least recently used first. The tenant None stands for all."""
        self._all = PausesOfTool()

    def ended(self, tenant: bytes, tool: str, seconds: float) -> None:
        """Notes a pause. Its length is NEVER if the program is presumed to have ended."""
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
        """Replaces the pauses that have not ended: tenants, tools, and seconds so far. They count
        as longer, so that a tool after which no program returns is known soon.
        """
        ongoing = defaultdict[tuple[bytes | None, str], list[float]](list)
        for tenant, tool, seconds in pauses:
            ongoing[tenant, tool].append(seconds)
            ongoing[None, tool].append(seconds)
        for key in list(islice(ongoing, _MAX_TOOLS)):
            self._of_tool.setdefault(key, PausesOfTool())
        for key, of_tool in self._of_tool.items():
            of_tool.note_ongoing(ongoing.get(key, ()))

    def index(self, tenant: bytes, tool: str, age: float) -> float:
        """The value per second of a context that has paused for `age` seconds, see
        `PausesOfTool.index`. Uses the pauses of the tool in the tenant. If there are too few, uses
        the pauses of the tool in all tenants, then the pauses of all tools. If these are too few,
        the value is 1 / (age + 1).
        """
        pauses = self._of(tenant, tool)
        return 1 / (age + 1) if pauses is None else pauses.index(age)

    def best(self, tenant: bytes, tool: str, age: float) -> tuple[float, float]:
        """The probability and the seconds within which a program returns that give the index."""
        pauses = self._of(tenant, tool)
        if pauses is None:
            return 1.0, age + 1
        _, chance, seconds = pauses.best(age)
        return chance, seconds

    def _of(self, tenant: bytes, tool: str) -> "PausesOfTool | None":
        for key in ((tenant, tool), (None, tool)):
            pauses = self._of_tool.get(key)
            if pauses is not None and len(pauses) >= _LEAST:
                return pauses
        return self._all if len(self._all) >= _LEAST else None


class PausesOfTool:
    """The lengths of the latest pauses of one tool."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_NUM_KEPT)
        self._ongoing: Sequence[float] = ()
        """The seconds so far of pauses that have not ended."""
        self._num_new = 0
        self._indexes: dict[int, float] = {}
        """By age, see `_PER_DOUBLING`."""

    def __len__(self) -> int:
        return len(self._latest) + len(self._ongoing)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self._num_new += 1

    def note_ongoing(self, seconds: Sequence[float]) -> None:
        if seconds or self._ongoing:
            self._ongoing, self._indexes = seconds[-_NUM_KEPT:], {}

    def index(self, age: float) -> float:
        """The largest, over all times t, of P(returns within t) / E[pause within t], given that the
        pause has lasted for `age` seconds (J. C. Gittins, "Bandit processes and dynamic allocation
        indices", 1979). Its unit is 1 / second. It is computed at the next lower of a few ages.
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
        """The index at this age, the probability of a return in the best time, and that time. One
        more pause of 2 * age + 1 seconds keeps the index above 0 when all have returned. A pause
        that has not ended adds its time so far, and no return.
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
