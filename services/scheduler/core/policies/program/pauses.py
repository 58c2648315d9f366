"""How long programs pause, by tool, and how likely it is that they return soon."""

import math
from collections import OrderedDict, deque

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

    def index(self, tenant: bytes, tool: str, age: float) -> float:
        """The value per second of a context that has paused for `age` seconds, see
        `PausesOfTool.index`. Uses the pauses of the tool in the tenant, or without enough of them
        those of the tool in all tenants, or those of all tools. Without enough of these, the value
        is 1 / (age + 1).
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
        self._num_new = 0
        self._indexes: dict[int, float] = {}
        """By age, see `_PER_DOUBLING`."""

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, seconds: float) -> None:
        self._latest.append(seconds)
        self._num_new += 1

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
        more pause of 2 * age + 1 seconds keeps the index above 0 when all have returned.
        """
        left = sorted([one - age for one in self._latest if one > age] + [age + 1])
        best, returned_seconds = (0.0, 0.0, 0.0), 0.0
        for place, seconds in enumerate(left):
            if seconds == NEVER:
                break
            returned_seconds += seconds
            num_others = len(left) - place - 1
            index = (place + 1) / (returned_seconds + num_others * seconds)
            if index > best[0]:
                best = index, (place + 1) / len(left), seconds
        return best
