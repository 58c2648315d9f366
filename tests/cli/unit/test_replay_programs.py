"""A replay of a log of the policy `program` makes the same decisions. The log has the times
for which the policy asked.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cli.errors import CommandError
from services.cli.replay.fields import Field
from services.cli.replay.history import History
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.cli.replay.what_if import changed_config, what_if
from services.common.pool.ids import RequestKey
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput, WaitReason
from services.scheduler.core.ports import PoolLost
from services.scheduler.core.request import Request
from services.scheduler.core.step_log.log_entry import TIMED_VERSION, VERSION, Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.stand_in_model import next_token

MAX_MODEL_LEN = 60
TENANTS = b"", b"", bytes(16)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request, which continues the turn that ended so many turns before, if there is one."""

    num_tokens: int
    max_tokens: int
    continues: int | None
    tool: str
    ends: bool
    pause: float
    program: DeclaredProgram | None = None


class Agents:
    """Runs turns on a recording scheduler. Each step takes a time of its own. The pool may be lost
    in a step, after it has answered some transactions.
    """

    def __init__(
        self, config: SchedulerConfig, turns: Sequence[Turn], losses: dict[int, int] | None = None
    ) -> None:
        self.config = config
        self.turns = turns
        self.now = 0.1
        self.entries: list[Entry] = []
        self.waits: Counter[WaitReason | None] = Counter()
        self._ended: list[Request] = []
        self._turns: dict[Request, Turn] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._losses = losses or {}
        self._pool = InProcessPool(config)
        self.scheduler = RecordingScheduler(
            config, self._pool, self.entries.append, clock=self._clock
        )

    def _clock(self) -> float:
        self.now += 1e-6
        return self.now

    async def run(self) -> None:
        """Adds up to two turns in each second step, and runs until all have ended."""
        turns = deque(self.turns)
        step = 0
        while turns or self.scheduler.has_work or self._in_flight:
            assert step < 2000
            for _ in range(min(len(turns), 2 * (step % 2 == 0))):
                self._add(turns.popleft())
            await self._step(step)
            step += 1

    def _add(self, turn: Turn) -> None:
        number = len(self._turns)
        tokens = [number, *range(turn.num_tokens - 1)]
        if turn.continues is not None and turn.continues < len(self._ended):
            earlier = self._ended[-1 - turn.continues].token_ids
            if len(earlier) + turn.num_tokens < MAX_MODEL_LEN - 12:
                tokens = [*earlier, *tokens]
        sampling = SamplingParams(max_tokens=turn.max_tokens)
        request = Request(
            f"r{number}",
            RequestKey(number + 1),
            tokens,
            len(tokens),
            sampling,
            program=turn.program,
            tenant=TENANTS[number % 3],
        )
        self._turns[request] = turn
        self.now += turn.pause
        self.scheduler.add(request)

    async def _step(self, step: int) -> None:
        self._pool.num_answers_left = self._losses.get(step)
        try:
            if self.scheduler.has_work:
                plan = await self.scheduler.schedule()
                self.waits[plan.wait_reason] += 1
                self._in_flight.append(plan)
        except PoolLost:
            self._in_flight.clear()
            self.scheduler.forget_pool()
            self._pool.reopen()
            return
        self._pool.num_answers_left = None
        depth = self.config.num_steps_in_flight
        if self._in_flight and not (len(self._in_flight) < depth and self._in_flight[-1].requests):
            self._update()

    def _update(self) -> None:
        plan = self._in_flight.popleft()
        tokens = [sampled_tokens(plan, index) for index in range(len(plan.requests))]
        seconds = 0.01 + 0.001 * len(plan.requests) + 0.003 * plan.num_tokens
        self.now += seconds
        ended = self.scheduler.update_from_output(plan, ModelRunnerOutput(tokens)).ended
        self.scheduler.step_costs.observe(len(plan.requests), plan.num_tokens, seconds)
        self._ended += ended
        for request in ended:
            if request.context is not None:
                turn = self._turns[request]
                self.scheduler.end_turn(request.context, turn.tool, ends=turn.ends)


def sampled_tokens(plan: SchedulerOutput, index: int) -> list[int]:
    request = plan.requests[index]
    end = plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index]
    return [next_token(request.token_ids)] if end >= request.num_tokens else []


def configuration(
    policy: str = "program", *, num_blocks: int = 24, depth: int = 1
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_blocks=num_blocks,
        policy=policy,
        async_scheduling=depth == 2,
    )


async def replayed(config: SchedulerConfig, entries: Sequence[Entry]) -> History:
    """The history of a log, whose replay must not differ."""
    replay = LogReplay(Header("none", config))
    for entry in entries:
        assert await replay.replay_entry(Field(json.loads(json.dumps(entry)))) == []
    return replay.history


TURNS = st.lists(
    st.builds(
        Turn,
        num_tokens=st.integers(1, 16),
        max_tokens=st.integers(1, 12),
        continues=st.none() | st.integers(0, 3),
        tool=st.sampled_from(("", "sed", "pytest")),
        ends=st.booleans(),
        pause=st.sampled_from((0.0, 0.01, 3.0, 700.0)),
        program=st.none()
        | st.builds(
            DeclaredProgram,
            id=st.sampled_from("abc"),
            parent_id=st.sampled_from(("", "a", "b")),
            tool=st.sampled_from(("", "grep")),
            ends=st.booleans(),
        ).filter(lambda program: program.id != program.parent_id),
    ),
    max_size=24,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=TURNS,
    losses=st.dictionaries(st.integers(0, 40), st.integers(0, 3), max_size=2),
    depth=st.sampled_from((1, 2)),
    num_blocks=st.integers(17, 40),
)
def test_a_replay_of_any_run_of_programs_makes_the_same_decisions(
    turns: list[Turn], losses: dict[int, int], depth: int, num_blocks: int
) -> None:
    config = configuration(num_blocks=num_blocks, depth=depth)
    agents = Agents(config, turns, losses)
    asyncio.run(agents.run())
    asyncio.run(replayed(config, agents.entries))


def crowd() -> list[Turn]:
    """Programs of which several do not fit in the pool together."""
    return [
        Turn(5 + number % 7, 4 + number % 5, 2 if number > 5 else None, "sed", number % 9 == 8, 0.2)
        for number in range(60)
    ]


async def crowded(policy: str = "program") -> Agents:
    agents = Agents(configuration(policy), crowd())
    await agents.run()
    return agents


async def test_the_log_has_times_and_the_ends_of_turns() -> None:
    agents = await crowded()
    assert agents.waits[WaitReason.RETAINED] > 5
    assert agents.scheduler.log_version == TIMED_VERSION
    calls = Counter(entry["call"] for entry in agents.entries if "now" in entry)
    plans = [entry for entry in agents.entries if entry["call"] == "schedule"]
    assert calls["schedule"] == len(plans)
    assert calls["add"] == 60
    assert sum(len(plan.get("observed_steps", ())) for plan in plans) > 100
    ends = [entry for entry in agents.entries if entry["call"] == "end_turn"]
    assert {"context", "tool", "ends"} < ends[0].keys()
    times = [entry["now"] for entry in agents.entries if "now" in entry]
    assert times == sorted(times)


async def test_logs_of_other_policies_have_no_times() -> None:
    agents = await crowded("fcfs")
    assert agents.scheduler.log_version == VERSION
    for entry in agents.entries:
        assert entry["call"] != "end_turn"
        assert not {"now", "observed_steps"} & entry.keys()


@pytest.mark.parametrize("change", [{"now": 1e6}, {"now": None}, {"observed_steps": []}])
async def test_another_time_leads_to_other_decisions(change: Entry) -> None:
    """The times are read: with one of them changed, or left out, the replay differs."""
    agents = await crowded()
    (name,) = change
    plans = [entry for entry in agents.entries if entry.get(name) and entry["call"] == "schedule"]
    for plan in plans[20:]:
        plan.update(change)
        if plan[name] is None:
            del plan[name]
    with pytest.raises(AssertionError):
        await replayed(agents.config, agents.entries)


async def test_other_policies_take_the_requests_of_a_log_of_programs() -> None:
    agents = await crowded()
    history = await replayed(agents.config, agents.entries)
    for policy in ("fcfs", "priority", "program"):
        run = await what_if(history, changed_config(agents.config, {"policy": policy}))
        assert len(run.accounts) == 60
        assert run.num_generated_tokens == sum(turn.max_tokens for turn in agents.turns)


async def test_with_the_settings_of_the_log_programs_are_scheduled_as_in_the_log() -> None:
    agents = await crowded()
    history = await replayed(agents.config, agents.entries)
    run = await what_if(history, agents.config)
    logged = [len(entry["keys"]) for entry in agents.entries if entry["call"] == "schedule"]
    assert len(run.samples) == len(logged)


async def test_a_log_without_times_cannot_be_replayed_with_the_policy() -> None:
    agents = await crowded("fcfs")
    history = await replayed(agents.config, agents.entries)
    with pytest.raises(CommandError, match="policy program needs the times of steps"):
        await what_if(history, changed_config(agents.config, {"policy": "program"}))
