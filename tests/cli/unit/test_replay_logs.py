"""A replay of a step log makes the same decisions, or reports where a changed log differs."""

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepwell.common.v1 import common_pb2

from services.cli.replay.fields import Field
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.common.pool.ids import RequestKey
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.grammar import GrammarStatus
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.ports import PoolLost
from services.scheduler.core.request import Request
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.simulation.inprocess_pool import InProcessPool
from tests.cli.recorded_agents import sampled_tokens
from tests.cli.recorded_logs import crowded, record
from tests.cli.replaying import replayed


class Fragile:
    """A recording scheduler whose pool can be lost. `losses` maps the step of a loss to the number
    of transactions that the pool still answers in this step.
    """

    def __init__(self, config: SchedulerConfig, losses: dict[int, int]) -> None:
        self.entries: list[Entry] = []
        self._pool = InProcessPool(config)
        self._scheduler = RecordingScheduler(config, self._pool, self.entries.append)
        self._losses = losses
        self._in_flight: deque[SchedulerOutput] = deque()
        self._depth = 2 if config.async_scheduling else 1

    async def run(self, requests: list[Request], resets: set[int]) -> None:
        step = 0
        while step < 12 or self._scheduler.has_work or self._in_flight:
            assert step < 1000
            for request in requests[2 * step : 2 * step + 2]:
                self._scheduler.add(request)
            await self._step(step, must_reset=step in resets)
            step += 1

    async def _step(self, step: int, *, must_reset: bool) -> None:
        self._pool.num_answers_left = self._losses.get(step)
        try:
            if must_reset:
                while self._in_flight:
                    self._update()
                self._scheduler.preempt_all()
                await self._scheduler.reset_prefix_cache()
            if self._scheduler.has_work:
                self._in_flight.append(await self._scheduler.schedule())
        except PoolLost:
            self._in_flight.clear()
            self._scheduler.forget_pool()
            self._pool.reopen()
            return
        self._pool.num_answers_left = None
        if self._in_flight and not (
            len(self._in_flight) < self._depth and self._in_flight[-1].requests
        ):
            self._update()

    def _update(self) -> None:
        plan = self._in_flight.popleft()
        tokens = [sampled_tokens(plan, index) for index in range(len(plan.requests))]
        self._scheduler.update_from_output(plan, ModelRunnerOutput(tokens))


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), max_size=12))
    return [
        Request(
            request_id=f"r{number}",
            key=number + 1,
            token_ids=[number % 2, *range(num_prompt - 1)],
            num_prompt_tokens=num_prompt,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                eos_token_ids=(7, 8, 9),
                repetition_detection=RepetitionDetection(2, 1, 2) if number % 3 else None,
                min_tokens=number % 4,
            ),
            priority=draw(st.integers(0, 2)),
            arrival_time=float(number // 3),
        )
        for number, (num_prompt, max_tokens) in enumerate(sizes)
    ]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=requests(),
    losses=st.dictionaries(st.integers(0, 25), st.integers(0, 3), max_size=4),
    resets=st.sets(st.integers(0, 20), max_size=2),
    policy=st.sampled_from(list(POLICIES)),
    async_scheduling=st.booleans(),
    num_blocks=st.integers(10, 20),
)
def test_a_replay_of_any_run_makes_the_same_decisions(
    requests: list[Request],
    losses: dict[int, int],
    resets: set[int],
    policy: str,
    async_scheduling: bool,
    num_blocks: int,
) -> None:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=36,
        block_size=4,
        num_blocks=num_blocks,
        policy=policy,
        async_scheduling=async_scheduling,
    )
    fragile = Fragile(config, losses)
    asyncio.run(fragile.run(requests, resets))

    async def again() -> None:
        replaying = LogReplay(Header("none", config))
        for entry in fragile.entries:
            assert await replaying.replay_entry(Field(json.loads(json.dumps(entry)))) == []
        run = replaying.statistics
        if run.samples:
            # The plot marks the preemptions of each step. Its headline has their sum.
            assert sum(sample.num_preemptions for sample in run.samples) == run.num_preemptions

    asyncio.run(again())


async def test_why_a_grammar_waits_is_replayed() -> None:
    """The request waits for its LoRA adapter, and later for its grammar."""
    config = SchedulerConfig(8, 32, 32, block_size=4, num_blocks=30, max_loras=2)
    entries: list[Entry] = []
    scheduler = RecordingScheduler(config, InProcessPool(config), entries.append)
    request = Request("a", RequestKey(1), [1, 2, 3], 3, SamplingParams(max_tokens=2))
    request.grammar, request.awaits_adapter = GrammarStatus.COMPILING, True
    scheduler.add(request)
    await scheduler.schedule()
    request.awaits_adapter = False
    await scheduler.schedule()
    assert [entry["passed_over"] for entry in entries[1:]] == [{"1": "adapters"}, {"1": "grammar"}]
    replay = LogReplay(Header("none", config))
    for entry in entries:
        assert await replay.replay_entry(Field(entry)) == []


# A changed log


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        ("schedule", "num_free_blocks", 3),
        ("schedule", "wait_reason", "a cold"),
        ("schedule", "appended_blocks", {"1": [[9]]}),
        ("update_from_output", "ended", [[1, "stop", 4]]),
        ("schedule", "unheard_of", 1),
    ],
)
def test_a_changed_decision_is_shown_with_its_step_and_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, call: str, field: str, value: Any
) -> None:
    log = record(crowded())
    number = next(n for n, e in enumerate(log.entries) if e.get("call") == call and e["step"] == 5)
    before = log.entries[number].get(field)
    log.entries[number][field] = value
    status, out, err = replayed(capsys, log.write(tmp_path / "steps.jsonl"))
    assert (status, err) == (1, "")
    assert f"step 5 {field}\n  logged   {json.dumps(value)}\n" in out
    assert f"  replayed {json.dumps(before)}\n" in out
    assert out.endswith(f"line {number + 1}: from this call on, the replay differs from the log\n")


def test_groups_of_other_attention_are_replayed_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    window = common_pb2.KVCacheGroup(
        attention_type=common_pb2.ATTENTION_TYPE_SLIDING_WINDOW,
        block_size=4,
        window=3,
        num_layers=1,
    )
    states = common_pb2.KVCacheGroup(
        attention_type=common_pb2.ATTENTION_TYPE_STATE_SPACE,
        block_size=4,
        num_layers=1,
        mamba_cache_mode=common_pb2.MAMBA_CACHE_MODE_ALIGN,
    )
    log = record(crowded(num_gpu_blocks=40), window, states)
    ends = {
        computed + scheduled
        for entry in log.entries
        if entry.get("call") == "schedule"
        for computed, scheduled in zip(
            entry["num_computed_tokens"], entry["num_scheduled_tokens"], strict=True
        )
        if scheduled > 4
    }
    assert all(end % 4 == 0 for end in ends), "chunks end where states are cached"
    assert any(0 in table for e in log.entries for t in tables(e) for table in t), "null blocks"
    status, out, _ = replayed(capsys, log.write(tmp_path / "steps.jsonl"))
    assert (status, out.splitlines()[-1]) == (0, "0 differences")


def tables(entry: Entry) -> list[list[list[int]]]:
    return list(entry.get("block_tables", {}).values())


def test_a_changed_prompt_is_noticed_where_it_first_matters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = record(crowded())
    added = next(e for e in log.entries if e.get("id") == "r3")
    added["cache_salt"] = ""
    status, out, _ = replayed(capsys, log.write(tmp_path / "steps.jsonl"))
    assert status == 1
    assert "num_computed_tokens\n" in out
