"""Agents' programs with names, their child programs, and how many the policy remembers."""

from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.common.pool.ids import RequestKey
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.scheduler.core.policies.program import ended_programs, pauses
from services.scheduler.core.policies.program.ended_programs import EndedPrograms
from services.scheduler.core.policies.program.pauses import PauseStatistics
from services.scheduler.core.policies.programs import CHILD, NamedPrograms, Program
from services.scheduler.core.request import Request
from tests.scheduler.agents import Agents
from tests.scheduler.story import Story, prompt


def program_of(agents: Agents, name: str) -> Program:
    (found,) = [
        one for key, one in agents.retention._known._named._programs.items() if key[-1] == name
    ]
    return found


async def test_a_named_program_goes_on_with_a_context_that_begins_differently() -> None:
    """The client has shortened the conversation. The old context (the KV blocks of the program's
    last request) is dropped.
    """
    agents = Agents()
    job = DeclaredProgram("job")
    await agents.turn("one", prompt(16), program=job)
    agents.now += 1.0
    program = program_of(agents, "job")
    (before,) = program.contexts
    await agents.turn("two", prompt(20, first=500), program=job)
    (after,) = program.contexts
    assert program.num_turns == 2
    assert before not in agents.retention._contexts
    assert after in agents.retention._contexts
    assert list(agents.retention.worth.pauses._all._latest) == [pytest.approx(1.02)]


async def test_a_name_counts_within_tenant_adapter_and_salt() -> None:
    agents = Agents()
    job = DeclaredProgram("job")
    for scope in ({"tenant": b"a"}, {"tenant": b"b"}, {"cache_salt": "s"}):
        await agents.turn("one", prompt(16), program=job, **scope)
    assert len(agents.retention._known._named) == 3


async def test_a_prompt_continues_the_context_of_the_program_that_it_names() -> None:
    """The prompt begins with the contexts (tokens of earlier requests) of both programs."""
    agents = Agents()
    own = await agents.turn("one", prompt(16), program=DeclaredProgram("own"))
    context = [*own, *prompt(20, first=700)]
    await agents.turn("other", context, program=DeclaredProgram("other", parent_id="own"))
    request = agents.story.add("two", [*context, 7], program=DeclaredProgram("own"))
    assert agents.retention._continued[request].program is program_of(agents, "own")


async def test_another_name_for_each_turn_is_one_program() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16), program=DeclaredProgram("a"))
    await agents.turn("two", [*context, *prompt(9, first=700)], program=DeclaredProgram("b"))
    assert program_of(agents, "b").num_turns == 2
    assert program_of_or_none(agents, "a") is None
    assert len(agents.retention._contexts) == 1


async def test_a_parent_keeps_its_name() -> None:
    """Otherwise program c would be a, the parent of b, and could not have b as its parent."""
    agents = Agents()
    context = await agents.turn("one", prompt(16), program=DeclaredProgram("a"))
    agents.story.add("two", prompt(16, first=300), program=DeclaredProgram("b", parent_id="a"))
    await agents.turn("three", [*context, *prompt(9, first=700)], program=DeclaredProgram("c"))
    assert program_of(agents, "a").num_turns == program_of(agents, "c").num_turns == 1
    agents.retention.check(asked("c", "b"))


async def test_a_context_of_another_tenant_is_not_continued() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16), tenant=b"a")
    request = agents.story.add("two", [*context, 7], tenant=b"b")
    assert request.program_turn is not None
    assert request.program_turn.number == 1


async def test_equal_prompts_of_another_tenant_end_no_pause() -> None:
    agents = Agents()
    for name, tenant in (("one", b"a"), ("two", b"b")):
        context = await agents.turn(name, prompt(16), tenant=tenant)
    assert len(agents.retention._contexts) == 2
    request = agents.story.add("three", [*context, 7], tenant=b"a")
    assert request.program_turn is not None
    assert request.program_turn.number == 2


async def test_a_prompt_without_a_name_continues_a_named_program() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16), program=DeclaredProgram("job"))
    agents.story.add("two", [*context, 7])
    assert program_of(agents, "job").num_turns == 2


async def test_an_answer_that_is_written_in_another_way_is_continued() -> None:
    """For example, a chat template leaves reasoning out of earlier answers."""
    agents = Agents()
    await agents.turn("one", prompt(18), max_tokens=12)
    (context,) = agents.retention._contexts.values()
    request = agents.story.add("two", [*prompt(18), 7, 8, *prompt(9, first=700)])
    assert agents.retention._continued[request] is context
    assert request.program_turn is not None
    assert (request.program_turn.number, request.program_turn.num_context_tokens) == (2, 18)


async def test_the_same_prompt_again_is_another_program() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(18), max_tokens=12)
    again = agents.story.add("again", prompt(18))
    assert again.program_turn is not None
    assert again.program_turn.number == 1
    request = agents.story.add("two", [*context, *prompt(9, first=700)])
    assert request.program_turn is not None
    assert (request.program_turn.number, request.program_turn.num_context_tokens) == (2, 30)


async def test_a_name_that_is_sent_later_is_that_of_the_program_before() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16))
    agents.story.add("two", [*context, 7], program=DeclaredProgram("job"))
    assert program_of(agents, "job").num_turns == 2


async def test_the_last_turn_leaves_no_context() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16), program=DeclaredProgram("job"))
    last = DeclaredProgram("job", ends=True)
    await agents.turn("two", [*context, *prompt(8, first=600)], program=last)
    assert not agents.retention._contexts
    assert not len(agents.retention._known._named)


async def test_the_named_tool_follows_the_turn() -> None:
    agents = Agents()
    await agents.turn("one", prompt(16), program=DeclaredProgram("job", tool="grep"))
    (context,) = agents.retention._contexts.values()
    assert context.reason == "grep"
    agents.story.scheduler.end_turn(context.id, "sed")
    assert context.reason == "sed"


async def test_a_program_waits_for_its_children() -> None:
    agents = Agents()
    await agents.turn("one", prompt(16), program=DeclaredProgram("parent", tool="grep"))
    (paused,) = agents.retention._contexts.values()
    child = {"id": "child", "parent_id": "parent"}
    await agents.turn("two", prompt(16, first=300), program=DeclaredProgram(**child))
    assert paused.reason == CHILD
    await agents.turn("3", prompt(16, first=300), program=DeclaredProgram(**child, ends=True))
    assert paused.reason == "grep"


async def test_a_program_that_never_says_goodbye_ends_with_its_parents_wait() -> None:
    agents = Agents()
    await agents.turn("one", prompt(16), program=DeclaredProgram("parent"))
    (paused,) = agents.retention._contexts.values()
    child = DeclaredProgram("child", "parent")
    await agents.turn("two", prompt(16, first=300), program=child)
    agents.now += 700
    await agents.turn("three", prompt(16, first=600))
    assert program_of_or_none(agents, "child") is None
    assert paused.program.num_children == 0


@pytest.mark.parametrize("policy", ["program", "continuum-fixed"])
async def test_a_program_whose_only_turn_left_no_context_ends(policy: str) -> None:
    """The client of the child has left before the first step. Otherwise the parent would seem to
    wait for the child for ever.
    """
    agents = Agents(policy=policy)
    agents.story.add("one", prompt(16), program=DeclaredProgram("parent"))
    parent = program_of(agents, "parent")
    child = DeclaredProgram("child", "parent")
    left = agents.story.add("two", prompt(16, first=300), program=child)
    agents.story.scheduler.abort(left)
    assert parent.num_children == 1
    agents.now += 500
    again = agents.story.add("two", prompt(16, first=300), program=child)
    assert again.program_turn is not None
    assert again.program_turn.number == 2
    agents.story.scheduler.abort(again)
    for seconds, num_children in ((500, 1), (200, 0)):
        agents.now += seconds
        await agents.turn("three", prompt(16, first=600))
        assert parent.num_children == num_children
    assert program_of_or_none(agents, "child") is None
    assert not agents.retention._known._without_context


def program_of_or_none(agents: Agents, name: str) -> Program | None:
    keys = [key for key in agents.retention._known._named._programs if key[-1] == name]
    return agents.retention._known._named._programs[keys[0]] if keys else None


async def test_parents_form_no_circle() -> None:
    agents = Agents()
    for name, parent in (("a", ""), ("b", "a"), ("a", "b")):
        await agents.turn(name, prompt(16), program=DeclaredProgram(name, parent))
    assert program_of(agents, "b").parent is program_of(agents, "a")
    assert program_of(agents, "a").parent is None


@pytest.mark.parametrize("policy", ["program", "continuum-fixed", "continuum-ttl"])
async def test_a_parent_that_the_program_started_is_refused(policy: str) -> None:
    story = Story(policy=policy)
    retention = story.scheduler.retention
    assert retention is not None
    for name, parent in (("a", ""), ("b", "a"), ("c", "b")):
        story.add(name, prompt(16), program=DeclaredProgram(name, parent))
    for name, parent in (("a", "b"), ("a", "c"), ("b", "c")):
        with pytest.raises(InvalidArgument) as error:
            retention.check(asked(name, parent))
        assert error.value.field == "program.parent_id"
    for name, parent in (("c", "a"), ("c", "b"), ("d", "c"), ("a", "x"), ("a", "")):
        retention.check(asked(name, parent))
    retention.check(asked("a", "c", cache_salt="another scope"))


def asked(name: str, parent: str, **fields: Any) -> Request:
    declared = DeclaredProgram(name, parent)
    return Request(name, RequestKey(99), [1], 1, SamplingParams(), program=declared, **fields)


async def test_chains_of_parents_are_bounded() -> None:
    agents = Agents()
    for number in range(40):
        named = DeclaredProgram(f"{number}", f"{number - 1}")
        agents.story.add(f"{number}", prompt(16), program=named)
    assert max(one.depth for one in agents.retention._known._named._programs.values()) == 32


async def test_programs_survive_the_loss_of_the_pool() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16), program=DeclaredProgram("job"))
    unnamed = await agents.turn("other", prompt(16, first=300))
    agents.story.scheduler.forget_pool()
    for name, tokens in (("two", context), ("four", unnamed)):
        request = agents.story.add(name, [*tokens, 7])
        assert agents.retention._programs[request].num_turns == 2
        assert not agents.retention.is_warm(request)


def named_request(number: int) -> Request:
    named = DeclaredProgram(f"{number}")
    return Request(f"{number}", RequestKey(number), [1], 1, SamplingParams(), program=named)


def test_the_longest_idle_program_is_forgotten() -> None:
    known = NamedPrograms(3)
    made = [Program(None, float(number)) for number in range(4)]
    made[0].num_running = 1
    forgotten = [known.add(named_request(number), one) for number, one in enumerate(made)]
    assert forgotten == [None, None, None, made[1]]
    assert known.find(named_request(0)) is made[0]
    assert known.find(named_request(1)) is None


def test_what_is_remembered_of_tools_and_applications_is_bounded() -> None:
    """The client names another tool each time, and begins each prompt differently."""
    statistics, ended = PauseStatistics(), EndedPrograms()
    for number in range(3000):
        statistics.ended(b"", f"tool {number}", 1.0)
        ended.add(Program(number.to_bytes(32, "big"), 0.0, num_turns=1, num_tokens=1))  # type: ignore[arg-type]
    assert len(statistics._of_tool) == pauses._MAX_TOOLS
    assert len(ended._of) == ended_programs._MAX_APPLICATIONS


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"id": "x" * 257}, "id"),
        ({"id": "a\nb"}, "id"),
        ({"id": "a", "parent_id": "\0"}, "parent_id"),
        ({"id": "a", "parent_id": "a"}, "parent_id"),
        ({"id": "a", "tool": "x" * 257}, "tool"),
        ({"id": "", "tool": "grep"}, "tool"),
        ({"id": "", "ends": True}, "ends"),
        ({"id": "", "parent_id": "a"}, "parent_id"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        DeclaredProgram(**fields).check()
    assert error.value.field == f"program.{field}"
