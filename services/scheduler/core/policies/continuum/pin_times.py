"""Computes how long the blocks of an ended turn are pinned, that is, kept for the next turn of the
same program (a run of an agent). Between two turns, in a pause, a tool runs.
"""

from collections import deque
from math import log, sqrt
from statistics import fmean

from services.common.recent import Recent
from services.scheduler.core.step_costs import StepCosts

FIXED_SECONDS = 2.0
LEAST_PAUSES = 100
"""A tool's pauses are used only if more than this number is known. The paper calls it K."""
_NUM_KEPT = 400
_NUM_WAITS = 100
_MAX_TOOLS = 256


class Pauses:
    """The lengths, in seconds, of the latest pauses, in total and by tool. If there are too many
    tools, the least recently used tool is forgotten.
    """

    def __init__(self) -> None:
        self.all: deque[float] = deque(maxlen=_NUM_KEPT)
        self._of_tool: Recent[str, deque[float]] = Recent(_MAX_TOOLS)

    def add(self, tool: str, seconds: float) -> None:
        self.all.append(seconds)
        of_tool = self._of_tool.get(tool) or deque(maxlen=_NUM_KEPT)
        self._of_tool[tool] = of_tool
        of_tool.append(seconds)

    def of(self, tool: str) -> deque[float]:
        return self._of_tool.get(tool) or deque()


class FixedTimes:
    """Pins turns for two seconds, but not after a tool whose known pauses are longer on average."""

    def __init__(self) -> None:
        self.pauses = Pauses()

    def seconds(self, tool: str, num_tokens: int) -> float:  # noqa: ARG002 - see OptimalTimes
        known = self.pauses.of(tool)
        return 0.0 if known and fmean(known) > FIXED_SECONDS else FIXED_SECONDS

    def waited(self, seconds: float) -> None:
        """Does nothing, because pins have a fixed time."""

    def program_ended(self, num_turns: int) -> None:
        """Does nothing, because pins have a fixed time."""


class OptimalTimes:
    """Pins a turn for the time t that maximizes P(pause <= t) * benefit - t. The benefit of a pin
    is the time that it saves: the time to compute the turn's tokens again, plus `regularity` times
    the mean wait of turns whose program has no pin. The paper multiplies benefit and t by the
    turn's fraction of the memory, which does not change the maximum.
    """

    def __init__(self, costs: StepCosts, token_budget: int) -> None:
        self.pauses = Pauses()
        self._costs = costs
        self._token_budget = token_budget
        self._waits: deque[float] = deque(maxlen=_NUM_WAITS)
        self._num_turns: deque[int] = deque(maxlen=_NUM_KEPT)
        self._regularity: float | None = None
        """The stored result of `regularity`. None if it must be computed."""

    def seconds(self, tool: str, num_tokens: int) -> float:
        """Seconds for which a turn of `num_tokens` tokens is pinned while `tool` runs."""
        reload_seconds = self._costs.seconds_of_prompt(num_tokens, 0, self._token_budget)
        wait = fmean(self._waits) if self._waits else 0.0
        if len(self.pauses.all) <= LEAST_PAUSES:
            # The optimum for exponential pauses with a mean of one second, and a regularity of 1.
            benefit = wait + reload_seconds
            return log(benefit) if benefit > 1 else 0.0
        known = self.pauses.of(tool)
        if len(known) <= LEAST_PAUSES:
            known = self.pauses.all
        return best_time(known, wait * self.regularity() + reload_seconds)

    def waited(self, seconds: float) -> None:
        """Records how long a turn waited whose program had no pin."""
        self._waits.append(seconds)

    def program_ended(self, num_turns: int) -> None:
        self._num_turns.append(num_turns)
        self._regularity = None

    def regularity(self) -> float:
        """Minus the correlation, over all turns of ended programs, between a turn's number in its
        program and the number of turns that remain after it. 1 if all programs have equally many
        turns, 0 if the numbers are independent, 1 while undefined.
        """
        if self._regularity is None:
            self._regularity = _regularity(self._num_turns)
        return self._regularity


def best_time(pauses: deque[float], benefit: float) -> float:
    """The time t with the largest P(pause <= t) * benefit - t: 0 or one of the pauses. If several
    times are equally good, the smallest.
    """
    best, best_gain = 0.0, 0.0
    for number, seconds in enumerate(sorted(pauses), 1):
        gain = number / len(pauses) * benefit - seconds
        if gain > best_gain:
            best, best_gain = seconds, gain
    return best


def _regularity(num_turns: deque[int]) -> float:
    """Minus the correlation of k and n - k, for k from 1 to n, for all n in `num_turns`."""
    count = sum(num_turns)
    served = sum(n * (n + 1) // 2 for n in num_turns)
    left = sum(n * (n - 1) // 2 for n in num_turns)
    served_squares = sum(n * (n + 1) * (2 * n + 1) // 6 for n in num_turns)
    left_squares = sum(n * (n - 1) * (2 * n - 1) // 6 for n in num_turns)
    products = sum((n - 1) * n * (n + 1) // 6 for n in num_turns)
    variances = (count * served_squares - served**2) * (count * left_squares - left**2)
    return (served * left - count * products) / sqrt(variances) if variances > 0 else 1.0
