"""The soak benchmark's random faults, and its checks of answers."""

import signal
from collections import Counter
from random import Random

from benchmarks.soak.checked_streams import Answer, Counts, make_request
from benchmarks.soak.fault_draws import Fault, draw_fault, draw_hit
from benchmarks.soak.fault_report import Effect, report, storm_report

NAMES = ["scheduler-0", "kvpool-0", "worker-0"]


def test_faults_hit_up_to_three_services_once_each_and_repeat_with_the_seed() -> None:
    drawn = [draw_fault(Random(seed), NAMES) for seed in range(200)]
    assert drawn == [draw_fault(Random(seed), NAMES) for seed in range(200)]
    for fault in drawn:
        victims = [name for _, name, _ in fault.hits]
        assert len(set(victims)) == len(victims)
    assert {len(fault.hits) for fault in drawn} == {1, 2, 3}
    assert {number for fault in drawn for _, _, number in fault.hits} == {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGTERM,
    }


def test_an_answer_differs_by_its_first_other_token_its_length_or_its_last_bits() -> None:
    whole = Answer([7, 8, 9], [-0.5, -0.25, -1.0], "abc")
    assert whole.difference(Answer([7, 8, 9], [-0.5, -0.25, -1.0], "abc")) == ""
    assert whole.difference(Answer([7, 6, 9])) == "token 1 is 8, not 6"
    assert whole.difference(Answer([7, 8])) == "3 tokens, not 2"
    assert whole.difference(Answer([7, 8, 9], [-0.5, -0.25, -1.0000001])) == (
        "other log-probabilities"
    )
    assert whole.difference(Answer([7, 8, 9], [-0.5, -0.25, -1.0], "abd")) == "another text"


def test_a_stream_asks_the_same_request_each_time() -> None:
    requests = [make_request(number, 4096, 160, 200) for number in range(28)]
    assert requests == [make_request(number, 4096, 160, 200) for number in range(28)]
    seeds = {request.sampling.seed for request in requests if request.sampling.temperature}
    assert len(seeds) == 14


def test_the_report_counts_failures_and_shows_the_longest_silence_of_each_kind() -> None:
    fault = Fault(((0.0, "kvpool-1", signal.SIGKILL),))
    effects = [Effect(fault, 0.5, 0.6, True), Effect(fault, 1.5, 2.0, False)]
    counts = Counts(good=12, failed=Counter({"UNAVAILABLE: gone": 2}))
    text = report(effects, counts)
    assert "| kvpool, SIGKILL | 2 | 1.00 / 1.50 | 2.00 |" in text
    assert "2 faults, 1 without recovery; 12 answers are right, 2 failed, 0 changed" in text
    assert "2 times UNAVAILABLE: gone" in text


def test_a_hit_kills_or_stops_one_of_the_services_that_run() -> None:
    hits = [hit for seed in range(200) for hit in draw_hit(Random(seed), NAMES[1:]).hits]
    assert len(hits) == 200
    assert {name for _, name, _ in hits} == {"kvpool-0", "worker-0"}
    assert {number for _, _, number in hits} == {signal.SIGKILL, signal.SIGSTOP}


def test_the_report_of_a_storm_counts_faults_by_kind_and_shows_silences_of_answers() -> None:
    faults = [Fault(((0.0, name, signal.SIGSTOP),)) for name in ("worker-0", "worker-2")]
    counts = Counts(good=100, silences=[0.5] * 98 + [2.0, 3.0])
    text = storm_report(faults, counts, "2 blocks not free")
    assert "| worker, SIGSTOP | 2 |" in text
    assert "2 faults; 100 answers are right, 0 failed, 0 changed" in text
    assert "median / p99 / longest: 0.50 / 2.00 / 3.00" in text
    assert "at the end 2 blocks not free" in text
