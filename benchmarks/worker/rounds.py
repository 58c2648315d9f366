"""The same load on all engines, in turns: rounds, their medians and what they say together."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.common.figures import interleaved

MIN_ROUNDS = 2
SECONDS_UNIT = "seconds"
SETTLE_SECONDS, SETTLE_STEP_SECONDS = 3.0, 0.1
SETTLED_CORES = 0.1


class Side(Protocol):
    """An engine that waits for loads."""

    def measure(self, load: str, number: int) -> float:
        """The figure of a load, in the round of this number."""
        ...

    def processor_seconds(self) -> float:
        """Processor time that it has used so far."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often a load is measured.

    After `MIN_ROUNDS` a side that has spent `load_seconds` on a load leaves its turns.
    """

    num_rounds: int
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """`rounds[side][load]`: the figures of rounds 0, 1, ... The first side is ours.

    `idle_cores[side]`: cores in use by a side, on average, while others were measured.
    """

    rounds: Mapping[str, Mapping[str, Sequence[float]]]
    idle_cores: Mapping[str, float]

    def medians(self) -> dict[str, dict[str, float]]:
        """Of each side and load that was measured."""
        return {
            side: {load: statistics.median(values) for load, values in loads.items()}
            for side, loads in self.rounds.items()
        }

    def lead(self, load: str) -> float | None:
        """Our speed to that of the fastest peer, whose median is the best.

        The median over rounds that both had, each against its neighbour in time.
        """
        ours, *peers = (loads[load] for loads in self.rounds.values() if load in loads)
        if not peers:
            return None
        sign = -1 if is_time(load) else 1
        best = max(peers, key=lambda values: sign * statistics.median(values))
        return statistics.median((a / b) ** sign for a, b in zip(ours, best, strict=False))


def is_time(load: str) -> bool:
    """Whether less of the figure is better."""
    return load.endswith(SECONDS_UNIT)


def compare(
    sides: Mapping[str, Side],
    loads: Mapping[str, Sequence[str]],
    schedule: Schedule,
    before_round: Callable[[], None],
    tell: Callable[[str], None],
) -> Comparison:
    """Measures each load on the sides that it names; a turn begins when the others are at rest.

    `before_round` is called before each round.
    """
    rounds: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    idle = _IdleTimes(sides)
    for load, names in loads.items():
        spent = dict.fromkeys(names, 0.0)
        for number, order in enumerate(interleaved(names, schedule.num_rounds)):
            taking = [
                name for name in order if number < MIN_ROUNDS or spent[name] < schedule.load_seconds
            ]
            if taking:
                before_round()
            for name in taking:
                begun = idle.settled()
                value = sides[name].measure(load, number)
                seconds = idle.add(name, begun)
                spent[name] += seconds
                rounds[name].setdefault(load, []).append(value)
                tell(f"{load}, {name}: {value:.4g} ({seconds:.1f} s)")
    return Comparison(rounds, idle.cores())


@dataclass(frozen=True, slots=True)
class _Moment:
    clock: float
    processor: Mapping[str, float]


class _IdleTimes:
    """Processor time of the sides while it is another's turn."""

    def __init__(self, sides: Mapping[str, Side]) -> None:
        self._sides = sides
        self._waited = dict.fromkeys(sides, 0.0)
        self._used = dict.fromkeys(sides, 0.0)

    def settled(self) -> _Moment:
        """Waits, but not for ever, until all are at rest: some spin on after they are done."""
        moment = self._now()
        deadline = moment.clock + SETTLE_SECONDS
        while moment.clock < deadline:
            time.sleep(SETTLE_STEP_SECONDS)
            before, moment = moment, self._now()
            most = SETTLED_CORES * (moment.clock - before.clock)
            if sum(moment.processor.values()) - sum(before.processor.values()) <= most:
                break
        return moment

    def _now(self) -> _Moment:
        used = {name: side.processor_seconds() for name, side in self._sides.items()}
        return _Moment(time.perf_counter(), used)

    def add(self, busy: str, begun: _Moment) -> float:
        """Takes in that one side was busy from then to now; returns how long."""
        ended = self._now()
        seconds = ended.clock - begun.clock
        for name in self._sides.keys() - {busy}:
            self._waited[name] += seconds
            self._used[name] += ended.processor[name] - begun.processor[name]
        return seconds

    def cores(self) -> dict[str, float]:
        return {
            name: self._used[name] / waited if waited else 0.0
            for name, waited in self._waited.items()
        }
