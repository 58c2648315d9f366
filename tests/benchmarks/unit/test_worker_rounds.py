"""Rounds of a comparison of workers: the order of engines, Stepwell's lead, and the table."""

import pytest

from benchmarks.worker.loads import PREFILL, PREFIX
from benchmarks.worker.rounds import Comparison, Schedule, compare
from benchmarks.worker.tables import caption, table

_QUIETLY = (lambda: None, lambda _: None)


class Scripted:
    """An engine with given figures. Each measurement uses processor time."""

    def __init__(
        self, name: str, values: list[float], log: list[tuple[str, int]], spinning: float = 0.0
    ) -> None:
        self._name = name
        self._values = iter(values)
        self._log = log
        self._spinning = spinning

    def measure(self, load: str, number: int) -> float:  # noqa: ARG002 - one load
        self._log.append((self._name, number))
        return next(self._values)

    def processor_seconds(self) -> float:
        return self._spinning * len(self._log)


class Unwinding(Scripted):
    """An engine that is busy after a measurement, until it has been checked a few times."""

    looks = 0

    def processor_seconds(self) -> float:
        self.looks += 1
        return float(min(self.looks, 4))


def test_engines_take_turns_and_begin_by_turns() -> None:
    log: list[tuple[str, int]] = []
    sides = {name: Scripted(name, [1.0, 2.0, 6.0], log, spinning=name == "c") for name in "abc"}
    compared = compare(sides, {PREFILL: ["a", "b"]}, Schedule(3, 60.0), *_QUIETLY)
    assert log == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert compared.rounds == {"a": {PREFILL: [1, 2, 6]}, "b": {PREFILL: [1, 2, 6]}, "c": {}}
    assert compared.medians()["a"] == {PREFILL: 2}
    assert compared.idle_cores["a"] == 0
    assert compared.idle_cores["c"] > 1, "a second of each of six short turns"


def test_a_slow_engine_leaves_its_turns_after_two_rounds() -> None:
    log: list[tuple[str, int]] = []
    sides = {name: Scripted(name, [1.0] * 5, log) for name in "ab"}
    compare(sides, {PREFILL: ["a", "b"]}, Schedule(5, load_seconds=0.0), *_QUIETLY)
    assert [number for _, number in log] == [0, 0, 1, 1]


def test_a_turn_begins_when_all_others_are_at_rest() -> None:
    log: list[tuple[str, int]] = []
    sides = {"a": Scripted("a", [1.0], log), "b": Unwinding("b", [], log)}
    compared = compare(sides, {PREFILL: ["a"]}, Schedule(1, 60.0), *_QUIETLY)
    assert compared.idle_cores["b"] == 0


def test_the_lead_is_over_the_fastest_round_by_round() -> None:
    """In the second round the machine is half as fast, which must not change the lead."""
    rates = {"ours": [300.0, 150.0], "slow": [100.0, 50.0], "fast": [200.0, 100.0]}
    compared = _comparison(PREFILL, rates)
    assert compared.lead(PREFILL) == pytest.approx(1.5)


def test_of_seconds_fewer_are_faster() -> None:
    compared = _comparison(PREFIX, {"ours": [2.0], "slow": [9.0], "fast": [3.0]})
    assert compared.lead(PREFIX) == pytest.approx(1.5)


def test_an_engine_without_others_has_no_lead() -> None:
    assert _comparison(PREFIX, {"ours": [2.0]}).lead(PREFIX) is None


def test_a_table_has_a_dash_where_nothing_was_measured_and_the_caption_says_why() -> None:
    rounds = {
        "ours": {PREFILL: [1600.0, 1600.0, 1600.0], PREFIX: [1.234, 1.234]},
        "peer": {PREFILL: [800.0, 800.0]},
    }
    compared = Comparison(rounds, {"ours": 0.0, "peer": 0.5})
    assert table({PREFILL: 1910.4}, compared).splitlines() == [
        "| load | limit | ours | peer | ours to the fastest other |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| {PREFILL} | 1910 | 1600 | 800 | 2.00 |",
        f"| {PREFIX} | — | 1.23 | — | — |",
    ]
    assert caption(compared, {"ours": (), "peer": (PREFIX,)}) == (
        "Medians of 3 rounds in turns; fewer rounds of slow engines: ours 2 (32 requests that "
        "share 384 of 416 tokens), peer 2 (prefill of 512 tokens). Not measured, because these "
        "loads take minutes: peer (32 requests that share 384 of 416 tokens). **These engines used "
        "processors while others were measured: peer (0.50 cores).**"
    )


def _comparison(load: str, values: dict[str, list[float]]) -> Comparison:
    return Comparison({side: {load: each} for side, each in values.items()}, {})
