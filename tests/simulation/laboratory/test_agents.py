"""Loads of agents, and what the policy `program` is worth with them."""

import random
from statistics import fmean

import pytest

from services.simulation.laboratory.agents import LOADS
from services.simulation.laboratory.run import RunResult, simulate
from services.simulation.laboratory.workloads import Traffic, generate
from services.worker.core.step_times import StepCosts, StepTimes
from tests.simulation.laboratory.small import setup

TIMES = StepTimes(
    StepCosts(seconds=7e-3, seconds_per_request=2e-5),
    StepCosts(seconds=7e-3, seconds_per_token=4e-4),
)


@pytest.mark.parametrize(
    ("name", "num_turns", "mean_pause"),
    [("swe", 10.9, 0.93), ("web", 6.3, 1.9), ("smith", 17.9, 1)],
)
def test_a_load_has_the_published_means(name: str, num_turns: float, mean_pause: float) -> None:
    rng = random.Random(1)
    drawn = [LOADS[name](rng, 1.0)[0] for _ in range(1000)]
    assert fmean(map(len, drawn)) == pytest.approx(num_turns, rel=0.05)
    pauses = [turn.pause_seconds for turns in drawn for turn in turns[1:]]
    assert fmean(pauses) == pytest.approx(mean_pause, rel=0.1)
    assert all(turn.tool for turns in drawn for turn in turns)


def run(policy: str, num_blocks: int) -> RunResult:
    small = setup(num_blocks, TIMES, policy=policy, max_num_seqs=64, max_num_batched_tokens=512)
    traffic = Traffic(50, 1.5, seed=3, scale=0.1)
    return simulate(small, generate("swe", traffic))


def test_programs_end_sooner_where_contexts_do_not_fit() -> None:
    """The contexts of the programs that live at one time take about three times the pool."""
    fcfs, program = run("fcfs", 251), run("program", 251)
    assert fmean(fcfs.accounts.job_seconds) > 1.8 * fmean(program.accounts.job_seconds)
    assert program.num_computed_tokens < 0.6 * fcfs.num_computed_tokens


def test_nothing_changes_where_all_contexts_fit() -> None:
    fcfs, program = run("fcfs", 4001), run("program", 4001)
    assert fmean(program.accounts.job_seconds) == pytest.approx(
        fmean(fcfs.accounts.job_seconds), rel=0.02
    )
