"""Workloads read from trace files, and distributions in generated workloads."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from services.cli.simulate import main
from services.cli.simulate.step_log import read_step_log
from services.common.errors import InvalidArgument
from services.common.pool.ids import RequestKey
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.replica import ReplicaShape
from services.scheduler.adapters.telemetry.step_log import header
from services.scheduler.core.output import ModelRunnerOutput
from services.scheduler.core.ports import PoolLost
from services.scheduler.core.request import Request
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.simulation.inprocess_pool import InProcessPool
from services.simulation.laboratory.programs import num_requests
from services.simulation.laboratory.run import simulate
from services.simulation.laboratory.traces import read_trace
from services.simulation.laboratory.workloads import GROWTH, Traffic, draw, generate
from tests.cli.recorded_logs import RecordedLog, crowded, record
from tests.scheduler.fake_worker import FakeWorker
from tests.simulation.laboratory.small import setup


def lines(*values: dict[str, object]) -> list[str]:
    return [json.dumps(value) for value in values]


def test_equal_ids_of_mooncakes_format_are_equal_blocks() -> None:
    trace = lines(
        {"timestamp": 7000, "input_length": 1100, "output_length": 1, "hash_ids": [4, 5, 6]},
        {"timestamp": 9000, "input_length": 1200, "output_length": 1, "hash_ids": [4, 5, 9]},
    )
    programs = read_trace(trace)
    assert [program.arrival_seconds for program in programs] == [0.0, 2.0]
    run = simulate(setup(max_num_batched_tokens=2048), programs)
    assert run.accounts.num_cached_tokens == 2 * 512
    assert run.num_computed_tokens == 1100 + 1200 - 1024


def test_a_session_of_the_superset_is_a_program_with_subagents() -> None:
    trace = lines(
        {
            "request_id": "a1",
            "session_id": "a",
            "timestamp": 0,
            "input_length": 64,
            "output_length": 1,
        },
        {
            "request_id": "b1",
            "session_id": "b",
            "wait_for": ["a1"],
            "input_length": 10,
            "output_length": 1,
        },
        {
            "session_id": "a",
            "delay": 500,
            "tool_wait_ms": 1500,
            "input_length": 15,
            "output_length": 1,
        },
        {"session_id": "a", "prefix_reset": True, "input_length": 32, "output_length": 1},
    )
    (program,) = read_trace(trace)
    assert num_requests(program) == 4
    assert [turn.pause_seconds for turn in program.turns] == [0.0, 2.0, 0.0]
    run = simulate(setup(), [program])
    # 7.4 s for 64 tokens, 2 s for the subagent, 2 s of pause, 2.6 s for 16 of 80 tokens, and 4.2 s
    # for 32 tokens after the reset of the prefix.
    assert run.accounts.job_seconds.tolist() == pytest.approx([7.4 + 2.0 + 2.0 + 2.6 + 4.2])


def test_a_program_may_end_with_its_subagents() -> None:
    (program,) = read_trace(
        lines(
            {"request_id": "a1", "session_id": "a", "input_length": 64, "output_length": 1},
            {"session_id": "b", "wait_for": ["a1"], "input_length": 10, "output_length": 1},
        )
    )
    for is_optimum in (False, True):
        run = simulate(replace(setup(), is_optimum=is_optimum), [program])
        # 7.4 s for 64 tokens, and 2 s for the subagent.
        assert run.accounts.job_seconds.tolist() == pytest.approx([7.4 + 2.0])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"input_length": 0, "output_length": 1}, "input_length must be a whole number"),
        ({"input_length": 9, "output_length": 1, "hash_ids": [1, 2]}, "one id for each 512"),
        ({"input_length": 9, "output_length": 1, "wait_for": ["x"]}, "must name an earlier line"),
        ({"input_length": 9, "output_length": 1, "wait_for": {"x": 1}}, "wait_for must name an"),
        ({"input_length": 9, "output_length": 1, "wait_for": [[]]}, "wait_for must name an"),
        ({"input_length": 9, "output_length": 1, "timestamp": -1}, "timestamp must be a number"),
        ({"input_length": 9, "output_length": 1, "delay": float("inf")}, "delay must be a number"),
    ],
)
def test_a_wrong_line_is_named(value: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=f"line 1 of the trace: .*{complaint}"):
        read_trace(lines(value))


def test_a_step_log_is_a_workload(tmp_path: Path) -> None:
    log = record(crowded())
    (tmp_path / "steps.jsonl").write_text(log.text())
    names = ["--workload", str(tmp_path / "steps.jsonl"), "--json", str(tmp_path / "out.json")]
    assert main([*names, "--kv-tokens", "64", "--block-size", "4", "--no-optimum"]) == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    plans = [entry for entry in log.entries if entry.get("call") == "schedule"]
    assert row["num_jobs"] == len({key for plan in plans for key in plan["new"]})


def test_a_step_log_of_a_lost_pool_is_a_workload(tmp_path: Path) -> None:
    config = replace(setup().config, groups=ReplicaShape(FakeWorker().description, 64).groups)
    entries = [header(config, ReplicaShape(FakeWorker().description, config.num_blocks), 0)]
    pool = InProcessPool(config)
    scheduler = RecordingScheduler(config, pool, entries.append)
    scheduler.add(Request("r", RequestKey(1), [1, 2, 3], 3, SamplingParams(max_tokens=1)))
    pool.num_answers_left = 0
    with pytest.raises(PoolLost):
        asyncio.run(scheduler.schedule())
    scheduler.forget_pool()
    pool.reopen()
    pool.num_answers_left = None
    plan = asyncio.run(scheduler.schedule())
    scheduler.update_from_output(plan, ModelRunnerOutput([[7]]))
    log = RecordedLog(entries).write(tmp_path / "steps.jsonl")
    (program,) = read_step_log(log)
    assert [(turn.num_new_tokens, turn.num_output_tokens) for turn in program.turns] == [(3, 1)]


def values_of(quantiles: Sequence[tuple[float, float]], number: int) -> list[float]:
    rng = random.Random(1)
    return sorted(draw(rng, quantiles) for _ in range(number))


def test_drawn_values_have_the_quantiles() -> None:
    values = values_of(GROWTH, 20_000)
    for share, expected in GROWTH[1:-1]:
        assert values[int(share * len(values))] == pytest.approx(expected, rel=0.06)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    programs = list(generate("chat", Traffic(4_000, 2.0, seed=9)))
    assert programs[-1].arrival_seconds == pytest.approx(2_000, rel=0.05)
    gaps = [b.arrival_seconds - a.arrival_seconds for a, b in pairwise(programs)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)


def test_a_pause_depends_on_the_regime() -> None:
    def pauses(regime: str) -> list[float]:
        traffic = Traffic(60, 1.0, seed=2, max_tokens=400_000)
        programs = generate(regime, traffic)
        return sorted(turn.pause_seconds for one in programs for turn in one.turns[1:])

    automated, interactive = pauses("automated"), pauses("interactive")
    assert automated[len(automated) // 2] == pytest.approx(0.5, rel=0.2)
    assert interactive[len(interactive) // 2] == pytest.approx(9.8, rel=0.2)
