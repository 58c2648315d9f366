"""The simulated loads of agents, and how policies that retain contexts (KV blocks of an ended
request for the program's next one) affect them.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest

from services.simulation.laboratory.clients import work
from services.simulation.laboratory.programs import Program, Turn
from services.simulation.laboratory.run import RunResult, simulate
from services.simulation.laboratory.workloads import Traffic, generate
from services.worker.core.step_times import StepCosts, StepTimes
from tests.simulation.laboratory.small import program, setup

TIMES = StepTimes(
    StepCosts(seconds=7e-3, seconds_per_request=2e-5),
    StepCosts(seconds=7e-3, seconds_per_token=4e-4),
)


Sample = list[tuple[Turn, ...]]
"""The turns (requests) of each of many programs."""


def all_turns(sample: Sample) -> list[Turn]:
    return [turn for turns in sample for turn in turns]


def later(sample: Sample) -> list[Turn]:
    return [turn for turns in sample for turn in turns[1:]]


STATISTICS: dict[str, Callable[[Sample], float]] = {
    "mean turns": lambda of: fmean(map(len, of)),
    "median turns": lambda of: median(map(len, of)),
    "single turns": lambda of: fmean(len(turns) == 1 for turns in of),
    "tokens": lambda of: fmean(map(work, of)),
    "median first": lambda of: median(turns[0].num_new_tokens for turns in of),
    "median new": lambda of: median(turn.num_new_tokens for turn in later(of)),
    "mean new": lambda of: fmean(turn.num_new_tokens for turn in later(of)),
    "median output": lambda of: median(turn.num_output_tokens for turn in all_turns(of)),
    "mean pause": lambda of: fmean(turn.pause_seconds for turn in later(of)),
    "median pause": lambda of: median(turn.pause_seconds for turn in later(of)),
    **{
        tool: lambda of, tool=tool: fmean(turn.tool == tool for turn in later(of))  # type: ignore[misc]
        for tool in ("sed", "python", "pytest", "search", "fetch")
    },
}
SHARED = {"swe": 1536, "swe-50": 1536, "web": 1024, "smith": 1536, "coding": 3700, "chat": 0}
SWE = {"median first": 1200, "mean pause": 0.93}
LOADS: dict[str, dict[str, float]] = {
    "swe": {
        **SWE,
        "mean turns": 10.9,
        "median new": 270,
        "mean new": 445,
        "median output": 144,
        "sed": 0.7,
        "python": 0.22,
        "pytest": 0.08,
    },
    "swe-50": {**SWE, "mean turns": 50, "mean new": 445 / 4.6, "median output": 144 / 4.6},
    "web": {
        "mean turns": 6.3,
        "median first": 640,
        "median new": 1080,
        "median output": 176,
        "mean pause": 1.9,
        "search": 0.6,
        "fetch": 0.4,
    },
    "smith": {
        "mean turns": 17.9,
        "median first": 3000 - 1536,
        "median new": 500,
        "median output": 30,
        "mean pause": 1,
        "median pause": 1,
    },
    "coding": {
        "median turns": 44,
        "median first": 0.25 * 9_200,
        "median new": 0.25 * 655,
        "median output": 0.25 * 217,
        "median pause": 9.8,
    },
    "chat": {
        "mean turns": 0.5 * 1 + 0.5 * 3,
        "single turns": 0.5,
        "median first": 400,
        "median new": 400,
        "median output": 200,
        "mean pause": 8 + 30,
    },
    # The programs are 45 % `swe`, 45 % `chat`, and 10 % `swe` with four times the turns.
    "mixed": {
        "mean turns": 0.45 * 10.9 + 0.45 * 2 + 0.1 * 4 * 10.9,
        "single turns": 0.45 * 0.5,
    },
}


def drawn(name: str, number: int = 1500) -> list[Program]:
    return list(generate(name, Traffic(number, 1.0, seed=1)))


@pytest.mark.parametrize("name", LOADS)
def test_a_load_has_the_statistics_of_its_definition(name: str) -> None:
    programs = drawn(name)
    sample = [program.turns for program in programs]
    found = {statistic: STATISTICS[statistic](sample) for statistic in LOADS[name]}
    assert found == pytest.approx(LOADS[name], rel=0.08)
    shared = {program.num_shared_tokens for program in programs}
    assert shared == ({0, 1536} if name == "mixed" else {SHARED[name]})


def test_fifty_turns_have_the_tokens_of_eleven() -> None:
    few, many = (STATISTICS["tokens"]([one.turns for one in drawn(n)]) for n in ("swe", "swe-50"))
    assert many == pytest.approx(few, rel=0.05)


def test_programs_arrive_as_a_poisson_process_and_share_six_applications() -> None:
    programs = drawn("swe", 4000)
    gaps = [after.arrival_seconds - one.arrival_seconds for one, after in pairwise(programs)]
    assert (fmean(gaps), pstdev(gaps)) == pytest.approx((1.0, 1.0), rel=0.05)
    shares = [fmean(one.application == number for one in programs) for number in range(6)]
    beyond = [number**-1.1 for number in range(1, 7)]  # tail of a Pareto distribution
    expected = [*(more - less for more, less in pairwise(beyond)), beyond[-1]]
    assert shares == pytest.approx(expected, abs=0.02)


def run(policy: str, num_blocks: int) -> RunResult:
    small = setup(num_blocks, TIMES, policy=policy, max_num_seqs=64, max_num_batched_tokens=512)
    traffic = Traffic(50, 1.5, seed=3, scale=0.1)
    return simulate(small, generate("swe", traffic))


def test_programs_end_sooner_where_contexts_do_not_fit() -> None:
    """The programs that run at one time need contexts of about three times the pool's size."""
    fcfs, program = run("fcfs", 251), run("program", 251)
    assert fmean(fcfs.accounts.job_seconds) > 1.8 * fmean(program.accounts.job_seconds)
    assert program.num_computed_tokens < 0.6 * fcfs.num_computed_tokens


@pytest.mark.parametrize(("policy", "ratio"), [("continuum-fixed", 2.0), ("continuum-ttl", 1.6)])
def test_pins_pay_where_contexts_do_not_fit(policy: str, ratio: float) -> None:
    fcfs, pins = run("fcfs", 251), run(policy, 251)
    assert fmean(fcfs.accounts.job_seconds) > ratio * fmean(pins.accounts.job_seconds)
    assert pins.num_computed_tokens < 0.7 * fcfs.num_computed_tokens


@pytest.mark.parametrize("policy", ["program", "continuum-fixed", "continuum-ttl"])
def test_nothing_changes_where_all_contexts_fit(policy: str) -> None:
    fcfs, other = run("fcfs", 4001), run(policy, 4001)
    assert fmean(other.accounts.job_seconds) == pytest.approx(
        fmean(fcfs.accounts.job_seconds), rel=0.02
    )


def test_the_work_that_is_left_is_the_order_if_it_is_known() -> None:
    """One request runs at a time. Programs with less work left end first."""
    alone = replace(setup(policy="program", max_num_seqs=1), tells_work=True)
    sizes = {1: 40, 2: 900, 3: 30, 4: 200}
    ends: list[float] = []
    items = [program(number, 0.01 * number, (10, size, 0.0)) for number, size in sizes.items()]
    run = simulate(alone, items, lambda: ends.append(0.0))
    assert sorted(run.accounts.job_seconds) == list(run.accounts.job_seconds)


def test_contexts_of_live_programs_are_counted_while_programs_arrive() -> None:
    """A step takes a second. If it computes a prompt, it takes 0.1 s more for each token."""
    turns, last = [(10, 3, 0.0), (10, 1, 5.0)], [(1, 1, 0.0)]
    run = simulate(setup(), [program(1, 0.0, *turns), program(2, 40.0, *last)])
    first, pause, second = 10 * (2.0 + 1.0 + 1.0), 13 * 5.0, 23 * 3.3
    assert run.accounts.mean_context_tokens == pytest.approx((first + pause + second) / 40)
