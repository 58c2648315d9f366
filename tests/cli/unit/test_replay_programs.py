"""A replay of a step log of the policy `program` makes the same decisions, because the log has all
readings of the clock on which they depend.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cli.errors import CommandError
from services.cli.replay.fields import Field
from services.cli.replay.history import History
from services.cli.replay.log_file import Header
from services.cli.replay.log_replay import LogReplay
from services.cli.replay.what_if import changed_config, what_if
from services.common.request.program import DeclaredProgram
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import WaitReason
from services.scheduler.core.policies import POLICIES, retains_contexts
from services.scheduler.core.step_log.log_entry import TIMED_VERSION, VERSION, Entry
from tests.cli.recorded_agents import Agents, Turn, configuration, crowded


async def replayed(config: SchedulerConfig, entries: Sequence[Entry]) -> History:
    """Replays a log, which must make the same decisions. Returns the start of what-if runs."""
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
            keep_seconds=st.sampled_from((0, 1, 3600)),
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
    policy=st.sampled_from([name for name in POLICIES if retains_contexts(name)]),
    reading_seconds=st.sampled_from((1e-6, 0.7)),
)
def test_a_replay_of_any_run_of_programs_makes_the_same_decisions(
    turns: list[Turn],
    losses: dict[int, int],
    depth: int,
    num_blocks: int,
    policy: str,
    reading_seconds: float,
) -> None:
    config = configuration(policy, num_blocks=num_blocks, depth=depth)
    agents = Agents(config, turns, losses, reading_seconds)
    asyncio.run(agents.run())
    asyncio.run(replayed(config, agents.entries))


async def test_the_log_has_times_and_the_ends_of_turns() -> None:
    agents = await crowded()
    assert agents.waits[WaitReason.RETAINED] >= 2
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
    """If the times in the log are changed or left out, the replay decides differently."""
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
    for policy in POLICIES:
        run = await what_if(history, changed_config(agents.config, {"policy": policy}))
        assert len(run.accounts) == 60
        assert run.num_generated_tokens == sum(turn.max_tokens for turn in agents.turns)


async def test_with_the_settings_of_the_log_programs_are_scheduled_as_in_the_log() -> None:
    """The decisions may differ a little: a what-if run knows only one time for each step."""
    agents = await crowded()
    history = await replayed(agents.config, agents.entries)
    run = await what_if(history, agents.config)
    logged = [len(entry["keys"]) for entry in agents.entries if entry["call"] == "schedule"]
    assert len(run.samples) == pytest.approx(len(logged), rel=0.15)


async def test_a_log_without_times_cannot_be_replayed_with_the_policy() -> None:
    agents = await crowded("fcfs")
    history = await replayed(agents.config, agents.entries)
    with pytest.raises(CommandError, match="policy=program needs the times of steps"):
        await what_if(history, changed_config(agents.config, {"policy": "program"}))
