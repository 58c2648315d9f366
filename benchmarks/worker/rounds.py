"""Measures the same loads on all engines in alternation, and compares the medians of rounds."""

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


class Engine(Protocol):
    """An engine that measures one load at a time."""

    def measure(self, load: str, number: int) -> float:
        """Measures a load in round `number`, and returns its figure."""
        ...

    def processor_seconds(self) -> float:
        """Processor seconds that the engine has used so far."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """Limits on the rounds and the time of each load.

    A load has at most `num_rounds` rounds. After `MIN_ROUNDS` rounds, an engine that has already
    spent `load_seconds` on the load is skipped.
    """

    num_rounds: int
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of a comparison.

    `rounds[engine][load]` lists the figures of all rounds. The first engine is Stepwell.
    `idle_cores[engine]` is the mean number of cores that the engine used while other engines were
    measured.
    """

    rounds: Mapping[str, Mapping[str, Sequence[float]]]
    idle_cores: Mapping[str, float]

    def medians(self) -> dict[str, dict[str, float]]:
        """The median over rounds of each engine's figure for each measured load."""
        return {
            engine: {load: statistics.median(values) for load, values in loads.items()}
            for engine, loads in self.rounds.items()
        }

    def lead(self, load: str) -> float | None:
        """The ratio of Stepwell's speed to the speed of the other engine with the best median. It
        is the median over the rounds that both engines have, and None without other engines.
        """
        ours, *peers = (loads[load] for loads in self.rounds.values() if load in loads)
        if not peers:
            return None
        sign = -1 if is_time(load) else 1
        best = max(peers, key=lambda values: sign * statistics.median(values))
        return statistics.median((a / b) ** sign for a, b in zip(ours, best, strict=False))


def is_time(load: str) -> bool:
    """Whether the load's figure is a time. If so, lower is better."""
    return load.endswith(SECONDS_UNIT)


def compare(
    engines: Mapping[str, Engine],
    loads: Mapping[str, Sequence[str]],
    schedule: Schedule,
    before_round: Callable[[], None],
    log: Callable[[str], None],
) -> Comparison:
    """Measures each load on the engines listed for it. A measurement begins when the other engines
    are idle. `before_round` is called before each round.
    """
    rounds: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    idle = _IdleTimes(engines)
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
                value = engines[name].measure(load, number)
                seconds = idle.add(name, begun)
                spent[name] += seconds
                rounds[name].setdefault(load, []).append(value)
                log(f"{load}, {name}: {value:.4g} ({seconds:.1f} s)")
    return Comparison(rounds, idle.cores())


@dataclass(frozen=True, slots=True)
class _Moment:
    clock: float
    processor: Mapping[str, float]


class _IdleTimes:
    """Measures the processor time of engines that should be idle while another is measured."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._waited = dict.fromkeys(engines, 0.0)
        self._used = dict.fromkeys(engines, 0.0)

    def settled(self) -> _Moment:
        """Waits until all engines are idle, at most for SETTLE_SECONDS.

        The threads of some engines spin for a while after their work.
        """
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
        used = {name: engine.processor_seconds() for name, engine in self._engines.items()}
        return _Moment(time.perf_counter(), used)

    def add(self, busy: str, begun: _Moment) -> float:
        """Records the processor time that the other engines used since `begun`, while only the
        engine `busy` was measured. Returns the seconds since `begun`.
        """
        ended = self._now()
        seconds = ended.clock - begun.clock
        for name in self._engines.keys() - {busy}:
            self._waited[name] += seconds
            self._used[name] += ended.processor[name] - begun.processor[name]
        return seconds

    def cores(self) -> dict[str, float]:
        return {
            name: self._used[name] / waited if waited else 0.0
            for name, waited in self._waited.items()
        }
