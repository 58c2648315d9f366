"""Why tokens of agents' programs are computed again, counted by cause."""

from collections import Counter

import pytest

from services.scheduler.core.policies.observer import ProgramObserver, RecomputationCause
from tests.scheduler.agents import Agents
from tests.scheduler.story import prompt


class Recomputed(ProgramObserver):
    def __init__(self, agents: Agents) -> None:
        self.counts = Counter[str]()
        agents.retention.observer = self

    def recomputed(self, num_tokens: int, cause: RecomputationCause) -> None:
        self.counts[cause.value] += num_tokens


async def test_a_context_that_others_took() -> None:
    agents = Agents(num_blocks=21)
    told = Recomputed(agents)
    context = await agents.turn("one", prompt(24))
    await agents.turn("large", prompt(70, first=600), max_tokens=2)
    await agents.turn("two", [*context, 7])
    # The large request needed 18 of the 20 blocks, so at most two of the context's seven are left.
    assert told.counts["evicted"] >= 20
    assert told.counts["preempted"] == told.counts["lost"] == 0


async def test_a_turn_that_was_preempted() -> None:
    """Each request fits into the pool alone, but both start at the same time."""
    agents = Agents(num_blocks=21, retention_headroom=0.0, scheduler_reserve_full_isl=False)
    told = Recomputed(agents)
    first = agents.story.add("first", prompt(30), max_tokens=30)
    second = agents.story.add("second", prompt(30, first=600), max_tokens=30)
    while not (first.is_finished and second.is_finished):
        await agents.step()
    assert 0 < told.counts["preempted"] <= 60
    assert told.counts["evicted"] == told.counts["lost"] == 0


@pytest.mark.parametrize("policy", ["program", "continuum-fixed"])
async def test_what_was_lost_with_the_pool(policy: str) -> None:
    agents = Agents(num_blocks=41, policy=policy)
    told = Recomputed(agents)
    context = await agents.turn("one", prompt(19))
    running = agents.story.add("running", prompt(16, first=300), max_tokens=8)
    await agents.step()
    num_computed = running.num_computed_tokens
    agents.story.lose()
    while not running.is_finished:
        await agents.step()
    await agents.turn("two", [*context, 7])
    assert told.counts == {"evicted": 0, "preempted": 0, "lost": num_computed + 20}
