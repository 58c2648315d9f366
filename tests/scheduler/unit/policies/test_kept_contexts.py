"""The policy `program` keeps a context (KV blocks of an agent's request for its next one) longer if
the client asks for that (`keep_seconds`).
"""

import pytest

from services.common.request.program import DeclaredProgram
from services.scheduler.core.policies.programs import Program
from tests.scheduler.agents import Agents
from tests.scheduler.story import prompt


def value(agents: Agents) -> float:
    agents.retention.worth.changed()
    ((found, _),) = agents.retention.worth.ranked(agents.now)
    return found


async def paused(keep_seconds: int) -> Agents:
    agents = Agents(num_blocks=21)
    for _ in range(12):
        agents.retention.worth.pauses.ended(b"", "", 1.0)
    wish = DeclaredProgram("", keep_seconds=keep_seconds)
    await agents.turn("one", prompt(16), program=wish)
    return agents


async def test_a_wish_keeps_half_of_the_value_until_its_time_has_passed() -> None:
    """The program has no id, and no earlier pause was longer than a second."""
    agents, other = await paused(300), await paused(0)
    first = value(agents)
    assert first == value(other)
    for now, is_kept in ((250.0, True), (290.0, True), (310.0, False)):
        agents.now = other.now = now
        without_wish, kept_value = value(other), value(agents)
        assert without_wish < 0.02 * first
        # The pause of this context is now the longest, which lowers the context's value a little.
        half = agents.retention.worth.pauses.index(b"", "", 0.0) / 2
        assert half == pytest.approx(first / 2, rel=0.1)
        assert kept_value == (half if is_kept else without_wish)


async def test_a_wish_does_not_lower_a_value() -> None:
    agents, other = await paused(300), await paused(0)
    agents.now = other.now = 0.9
    assert value(agents) == value(other) > 0


async def test_a_wish_promises_nothing() -> None:
    """A request may use the blocks of all contexts if nothing else runs."""
    agents = await paused(3600)
    await agents.turn("large", prompt(70, first=600), max_tokens=2)
    (before, _) = agents.retention._contexts.values()
    assert before.num_blocks < 4


async def test_a_program_that_has_ended_is_not_kept() -> None:
    agents = Agents()
    last = DeclaredProgram("job", ends=True, keep_seconds=300)
    await agents.turn("one", prompt(16), program=last)
    assert not agents.retention._contexts


def kept(agents: Agents) -> list[Program]:
    return [context.program for context in agents.retention._contexts.values()]


@pytest.mark.parametrize("keep_seconds", [3600, 864_000])
async def test_an_idle_program_is_known_until_its_time_has_passed_at_most_an_hour(
    keep_seconds: int,
) -> None:
    agents = Agents(num_blocks=101)
    wish = DeclaredProgram("", keep_seconds=keep_seconds)
    await agents.turn("one", prompt(16), program=wish)
    (program,) = kept(agents)
    await agents.turn("other", prompt(16, first=300))
    for now, is_kept in ((700.0, True), (3590.0, True), (3610.0, False)):
        agents.now = now
        await agents.turn(f"at {now}", prompt(16, first=int(now)))
        assert (program in kept(agents)) is is_kept
    assert program.has_ended
