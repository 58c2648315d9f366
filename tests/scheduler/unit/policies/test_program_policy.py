"""The scheduling policy `program`, which retains contexts (KV blocks of an ended request for the
program's next one): its statistics, and its decisions with a real pool.
"""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import ContextId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.scheduler.core.output import WaitReason
from services.scheduler.core.policies.program.ended_programs import EndedPrograms
from services.scheduler.core.policies.program.pauses import NEVER, PausesOfTool, PauseStatistics
from services.scheduler.core.policies.programs import Program
from services.scheduler.core.request import Request
from tests.scheduler.agents import Agents
from tests.scheduler.story import Story, prompt

TOOL_SECONDS = 1.0


def index_by_definition(seconds: list[float], age: float) -> float:
    """The largest value of P(pause <= t) / E[min(pause, t)] for the time that is left after `age`.
    As t, tries what is left of all longer pauses. One more pause of 2 * age + 1 is assumed.
    """
    left = [one - age for one in seconds if one > age] + [age + 1]
    within = [one for one in left if one < math.inf]
    return max(
        sum(one <= limit for one in left) / sum(min(one, limit) for one in left) for limit in within
    )


@given(st.lists(st.floats(0.01, 100) | st.just(NEVER), min_size=1, max_size=30), st.floats(0, 120))
def test_the_index_is_that_of_gittins(seconds: list[float], age: float) -> None:
    pauses = PausesOfTool()
    for one in seconds:
        pauses.add(one)
    step = math.floor(4 * math.log2(age + 0.01))
    computed_at = max(0.0, 2 ** (step / 4) - 0.01)
    assert computed_at <= age + 1e-9
    expected = index_by_definition(seconds, computed_at)
    assert pauses.index(age) == pytest.approx(expected, rel=1e-6)


def test_a_tool_without_pauses_is_judged_by_all_of_them() -> None:
    pauses = PauseStatistics()
    assert pauses.index(b"", "sed", 3.0) == 1 / 4
    for _ in range(10):
        pauses.ended(b"", "sed", 0.5)
    assert pauses.index(b"", "sed", 0.0) == pauses.index(b"", "grep", 0.0) > 1
    assert pauses.index(b"", "sed", 5.0) < 1


def test_a_tool_after_which_nobody_returns_is_worth_little() -> None:
    """20 programs have paused without a tool call for 1 to 20 seconds, and none has returned."""
    pauses = PauseStatistics()
    for _ in range(20):
        pauses.ended(b"", "sed", 0.5)
    assert pauses.index(b"", "", 0.0) == pauses.index(b"", "sed", 0.0)
    pauses.note_ongoing((b"", "", float(seconds)) for seconds in range(1, 21))
    # 20 pauses, and the assumed one of 1 s. Only the assumed one ends within 1 s.
    assert pauses.index(b"", "", 0.0) == pytest.approx(1 / 21)
    assert pauses.index(b"", "sed", 0.0) == pytest.approx(21 / 11)
    pauses.note_ongoing([])
    assert pauses.index(b"", "", 0.0) == pauses.index(b"", "sed", 0.0)


async def test_pauses_that_have_not_ended_are_noted_when_memory_is_short() -> None:
    agents, _, _ = await paused_and_running()
    agents.now += 3.0
    agents.story.add("new", prompt(80, first=600), max_tokens=2)
    await agents.step()
    (seconds,) = agents.retention.worth.pauses._of_tool[b"", ""]._ongoing
    assert seconds > 3.0


def test_longer_programs_have_more_work_left() -> None:
    ended = EndedPrograms()
    assert ended.expected_tokens(None, 0) > ended.expected_tokens(None, 2)
    for turns in (2, 2, 2, 10, 10, 10):
        ended.add(Program(None, 0.0, num_turns=turns, num_tokens=100 * turns))
    expected = [ended.expected_tokens(None, num_before) for num_before in (0, 2, 10)]
    # A turn has 100 tokens. 6 turns are expected at first, 8 more after 2, half a turn after 10.
    assert expected == pytest.approx([600, 800, 50])


def test_a_new_application_is_expected_to_be_like_other_new_ones() -> None:
    """Conversations, which have no common prefix, are short. The programs of one agent are long."""
    ended = EndedPrograms()
    agent = BlockHash(b"agent")
    for number in range(40):
        ended.add(Program(agent, 0.0, num_turns=20, num_tokens=2_000))
        ended.add(Program(BlockHash(bytes([number])), 0.0, num_turns=2, num_tokens=200))
    # 40 conversations and the agent's first 5 programs average 4 turns of 100 tokens.
    assert ended.expected_tokens(BlockHash(b"new"), 0) == pytest.approx(400)
    assert ended.expected_tokens(agent, 0) == pytest.approx(2_000)


def test_a_program_that_is_presumed_to_have_ended_counts_until_it_returns() -> None:
    ended, agent = EndedPrograms(), BlockHash(b"agent")
    programs = [
        Program(agent, 0.0, num_turns=turns, num_tokens=100 * turns) for turns in (1, 3) * 5
    ]
    for one in programs:
        ended.presume(one)
        ended.presume(one)
    assert ended.expected_tokens(agent, 0) == pytest.approx(200)
    # Only an application's first five programs count for others: 1, 3, 1, 3 and 1 turns.
    assert ended.expected_tokens(BlockHash(b"new"), 0) == pytest.approx(180)
    for one in programs[::2]:
        ended.returned(one)
    assert ended.expected_tokens(agent, 0) == pytest.approx(300)
    assert ended.expected_tokens(BlockHash(b"new"), 0) == 8
    for one in programs[1::2]:
        ended.add(one)
    assert ended.expected_tokens(agent, 0) == pytest.approx(300)
    assert not ended._presumed


def test_a_pause_is_unusual_after_twice_the_time_of_nearly_all_returns() -> None:
    pauses = PauseStatistics()
    for seconds in range(1, 10):
        pauses.ended(b"", "sed", float(seconds))
    assert not pauses.is_unusual(b"", "sed", 1e9)  # fewer than ten have returned
    for _ in range(20):
        pauses.ended(b"", "sed", NEVER)
    pauses.ended(b"", "sed", 10.0)
    assert pauses.is_unusual(b"", "sed", 20.1)
    assert not pauses.is_unusual(b"", "sed", 20.0)


async def test_programs_without_a_last_turn_are_presumed_to_have_ended() -> None:
    """Eight programs have one turn each, and no client declares that it is the last."""
    agents, _, _ = await paused_and_running()
    contexts = [await agents.turn(f"{first}", prompt(13, first)) for first in range(700, 760, 10)]
    assert agents.retention._ended.expected_tokens(BlockHash(b"new"), 0) == 8
    agents.now += 2 * TOOL_SECONDS + 1
    agents.story.add("new", prompt(80, first=600), max_tokens=1)
    await agents.step()
    assert len(agents.retention._ended._presumed) == 8
    assert agents.retention._ended.expected_tokens(BlockHash(b"new"), 0) > 8
    returning = agents.story.add("returning", [*contexts[0], 5], max_tokens=1)
    assert agents.retention._programs[returning].num_turns == 2
    assert len(agents.retention._ended._presumed) == 7


async def test_a_prompt_that_begins_with_a_paused_context_continues_its_program() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16))
    (program,) = {one.program for one in agents.retention._contexts.values()}
    agents.now += TOOL_SECONDS
    request = agents.story.add("two", [*context, *prompt(9, first=700)], max_tokens=4)
    other = agents.story.add("other", prompt(16, first=500), max_tokens=4)
    assert agents.retention.is_warm(request)
    assert not agents.retention.is_warm(other)
    while not request.is_finished:
        await agents.step()
    await agents.step()
    assert request.num_cached_tokens == 16
    assert program.num_turns == 2
    assert agents.retention.worth.pauses._all._latest == pytest.approx([TOOL_SECONDS + 0.02])


async def paused_and_running(**config: object) -> tuple[Agents, list[int], Request]:
    """A pool of 40 blocks: a paused context has 16, and a request runs. Pauses take a second."""
    agents = Agents(num_blocks=41, max_model_len=160, max_num_batched_tokens=200, **config)
    for _ in range(12):
        agents.retention.worth.pauses.ended(b"", "", TOOL_SECONDS)
    context = await agents.turn("paused", prompt(61), max_tokens=4)
    running = agents.story.add("running", prompt(20, first=300), max_tokens=60)
    await agents.step()
    return agents, context, running


async def test_a_request_waits_while_a_paused_context_is_worth_more() -> None:
    agents, context, _ = await paused_and_running()
    new = agents.story.add("new", prompt(80, first=600), max_tokens=2)
    plan = await agents.story.scheduler.schedule()
    assert (plan.new, plan.wait_reason) == ([], WaitReason.RETAINED)
    assert agents.cached(context) == 64
    assert new in agents.story.scheduler.queues


WINDOWS = (
    KVCacheGroup(AttentionType.FULL, 4),
    KVCacheGroup(AttentionType.SLIDING_WINDOW, 4, window=8),
)


async def test_a_context_with_windows_is_kept_whole() -> None:
    agents, context, _ = await paused_and_running(groups=WINDOWS)
    (paused,) = agents.retention._contexts.values()
    worth = agents.retention.worth
    assert 16 < paused.num_blocks == paused.num_own_blocks < 20
    new = agents.story.add("new", prompt(40, first=600), max_tokens=2)
    await agents.step()
    assert worth.is_held_up
    assert new in agents.story.scheduler.queues
    assert worth.seconds(paused) == pytest.approx(worth._seconds_per_token() * 65)
    for credit, number in ((0.99, 0), (1.01, paused.num_blocks)):
        worth._credit = credit * worth.seconds(paused)
        assert worth.num_blocks(num_running=10**9, now=agents.now) == number
    again = agents.story.add("again", [*context, *prompt(8, first=900)], max_tokens=1)
    assert agents.retention.is_warm(again)
    while not again.is_finished:
        await agents.step()
    assert again.num_cached_tokens == 64


async def test_a_context_with_windows_is_lost_with_its_first_block() -> None:
    agents, context, running = await paused_and_running(groups=WINDOWS)
    running.max_num_tokens = 150
    while agents.retention.num_retained_blocks and not running.is_finished:
        await agents.step()
    assert not running.is_finished
    (paused,) = agents.retention._contexts.values()
    assert (paused.num_blocks, paused.num_own_blocks) == (0, 0)
    again = agents.story.add("again", [*context, *prompt(8, first=900)], max_tokens=1)
    assert agents.retention.is_cold(again)


async def test_the_credit_of_waiting_bounds_the_wait() -> None:
    """The client keeps the context, so its value does not decrease. Still the wait ends."""
    agents = Agents(num_blocks=41, max_model_len=160, max_num_batched_tokens=200)
    for _ in range(12):
        agents.retention.worth.pauses.ended(b"", "", TOOL_SECONDS)
    wish = DeclaredProgram("", keep_seconds=3600)
    await agents.turn("paused", prompt(61), max_tokens=4, program=wish)
    running = agents.story.add("running", prompt(20, first=300), max_tokens=60)
    await agents.step()
    new = agents.story.add("new", prompt(80, first=600), max_tokens=2)
    while new.num_cached_tokens is None and not running.is_finished:
        await agents.step()
        agents.now += 3.0
    assert not running.is_finished


async def test_the_wait_of_a_client_that_left_is_no_credit_of_the_next() -> None:
    agents = Agents(num_blocks=41, max_model_len=160, max_num_batched_tokens=200)
    for _ in range(12):
        agents.retention.worth.pauses.ended(b"", "", TOOL_SECONDS)
    wish = DeclaredProgram("", keep_seconds=3600)
    context = await agents.turn("paused", prompt(61), max_tokens=4, program=wish)
    agents.story.add("running", prompt(20, first=300), max_tokens=60)
    await agents.step()
    left = agents.story.add("left", prompt(80, first=600), max_tokens=2)
    await agents.step()
    assert agents.retention.worth.is_held_up
    agents.story.scheduler.abort(left)
    agents.now += 600.0
    agents.story.add("next", prompt(80, first=600), max_tokens=2)
    for _ in range(3):
        await agents.step()
    assert agents.retention.worth.is_held_up
    assert agents.cached(context) == 64


async def test_an_admitted_turn_takes_over_its_context() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16))
    again = agents.story.add("again", [*context, *prompt(8, first=900)], max_tokens=30)
    for _ in range(2):
        await agents.step()
    assert again.num_cached_tokens == 16
    assert not agents.retention._contexts
    assert agents.story.pool.core.context_ids == []


async def test_a_context_of_a_lost_pool_has_no_blocks() -> None:
    agents = Agents()
    context = await agents.turn("one", prompt(16))
    agents.retention.forget()
    again = agents.story.add("again", [*context, *prompt(8, first=900)], max_tokens=1)
    assert agents.retention.is_cold(again)


async def test_a_context_that_another_replaces_before_its_blocks_are_free_is_dropped() -> None:
    agents = Agents()
    both = [agents.story.add(name, prompt(16), max_tokens=4) for name in ("one", "two")]
    while not all(request.is_finished for request in both):
        await agents.step()
    for _ in range(3):
        await agents.step()
    assert len(agents.retention._contexts) == 1
    assert agents.story.pool.core.context_ids == [*agents.retention._contexts]


async def test_contexts_that_a_tier_loads_faster_are_worth_less() -> None:
    agents, _, _ = await paused_and_running()
    worth = agents.retention.worth
    computed = worth._seconds_per_token()
    agents.story.scheduler.step_costs.observe_load(num_tokens=100, seconds=0.1)
    assert worth._seconds_per_token() == computed, "no program has loaded its context"
    worth.returned(num_loaded=30, num_recomputed=10)
    assert worth._seconds_per_token() == pytest.approx(0.25 * computed + 0.75 * 0.001)
    agents.story.scheduler.step_costs._loads.clear()
    agents.story.scheduler.step_costs.observe_load(num_tokens=1, seconds=9.0)
    assert worth._seconds_per_token() == pytest.approx(computed)


async def test_a_prompt_that_is_much_longer_than_a_step_earns_its_blocks_too() -> None:
    """The next steps have free blocks, but the whole prompt needs two more, which a context has."""
    agents = Agents(num_blocks=61, max_num_batched_tokens=16)
    await agents.turn("paused", prompt(61), max_tokens=4)
    running = agents.story.add("running", prompt(20, first=300), max_tokens=60)
    await agents.step()
    new = agents.story.add("new", prompt(160, first=600), max_tokens=2)
    while new.num_cached_tokens is None and not running.is_finished:
        await agents.step()
        agents.now += 3.0
    assert not running.is_finished


async def test_nothing_is_held_for_a_context_when_nothing_runs() -> None:
    agents, context, running = await paused_and_running()
    while not running.is_finished:
        await agents.step()
    await agents.turn("new", prompt(120, first=600), max_tokens=2)
    assert 0 < agents.cached(context) < 64


async def test_a_program_that_has_ended_holds_nothing() -> None:
    agents, context, _ = await paused_and_running()
    (paused,) = agents.retention._contexts
    agents.retention.end_turn(paused, "", ends=True)
    agents.story.add("new", prompt(80, first=600), max_tokens=2)
    await agents.step()
    await agents.step()
    assert agents.cached(context) < 64


async def test_contexts_of_a_tenant_with_more_than_its_share_are_worth_less() -> None:
    agents = Agents(num_blocks=101, max_model_len=160, max_num_batched_tokens=200)
    for number in range(4):
        tokens = prompt(41, first=100 * number)
        await agents.turn(f"{number}", tokens, tenant=b"many")
    await agents.turn("few", prompt(41, first=600), tenant=b"few", tenant_weight=3.0)
    values = {
        context.program.tenant: value
        for value, context in agents.retention.worth.ranked(agents.now)
    }
    # By its weight, the share of tenant "many" is a quarter of the blocks, but it has 80 %.
    assert values[b"few"] / values[b"many"] > 2.5
    assert agents.retention.worth.tenants_factors() == {b"many": pytest.approx(3.2), b"few": 1.0}


async def test_a_tenant_has_no_more_contexts_than_its_limit() -> None:
    """A context has 5 of 40 blocks. One tenant may have 12 blocks, another has no limit."""
    agents = Agents(num_blocks=41, max_num_batched_tokens=200)
    limited = {"tenant": b"limited", "tenant_max_retained_share": 0.3}
    contexts = [
        await agents.turn(f"{first}", prompt(17, first=first), **fields)
        for first, fields in (
            (100, {}),
            (200, limited),
            (300, limited),
            (400, {"tenant": b"free"}),
            (500, {"tenant": b"free"}),
        )
    ]
    owners = [one.program.tenant for one in agents.retention._contexts.values()]
    assert owners == [b"", b"limited", b"limited", b"free", b"free"]
    contexts.append(await agents.turn("600", prompt(17, first=600), **limited))
    owners = [one.program.tenant for one in agents.retention._contexts.values()]
    assert owners == [b"", b"limited", b"free", b"free", b"limited"]
    # The context was dropped, but the program's next turn still continues the program.
    later = agents.story.add("later", [*contexts[1], 7], **limited)
    assert later.program_turn is not None
    assert later.program_turn.number == 2
    assert not agents.retention.is_warm(later)


async def test_running_requests_take_blocks_of_contexts_before_any_is_preempted() -> None:
    agents, context, running = await paused_and_running()
    agents.story.add("more", prompt(20, first=800), max_tokens=80)
    while not running.is_finished:
        await agents.step()
    assert agents.story.scheduler.num_preemptions == 0
    assert agents.cached(context) < 64


@pytest.mark.parametrize("num_warm", [0, 32])
async def test_a_request_without_its_context_leaves_headroom(num_warm: int) -> None:
    """A request with a context is called warm, and a request without one is called cold. After 32
    warm admissions in a row the cold request is next, but it must still leave headroom.
    """
    agents = Agents(num_blocks=41, max_model_len=160, max_num_batched_tokens=200)
    agents.retention.turns.num_warm = num_warm
    agents.story.add("first", prompt(20, first=300), max_tokens=60)
    await agents.step()
    agents.story.add("large", prompt(130, first=600), max_tokens=2)
    plan = await agents.story.scheduler.schedule()
    # 34 blocks are free and 33 are needed, but a tenth of the 40 blocks must stay free.
    assert (plan.new, plan.wait_reason) == ([], WaitReason.HEADROOM)


LENGTHS = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 30)), min_size=1, max_size=20)


@given(LENGTHS, st.integers(31, 60))
@settings(max_examples=50, deadline=None)
async def test_programs_of_one_turn_are_scheduled_as_with_fcfs(
    lengths: list[tuple[int, int]], num_blocks: int
) -> None:
    ends = DeclaredProgram("", ends=True)
    fcfs, program = (
        Story(policy=one, num_blocks=num_blocks, max_model_len=120) for one in ("fcfs", "program")
    )
    while True:
        for number, (num_tokens, max_tokens) in enumerate(lengths[:3]):
            for story in (fcfs, program):
                first = 7 * (len(lengths) - number)  # no two prompts begin alike
                story.add(
                    f"{first}", prompt(num_tokens, first), max_tokens=max_tokens, program=ends
                )
        lengths = lengths[3:]
        steps = [await story.step() for story in (fcfs, program)]
        assert steps[0].granted == steps[1].granted
        if not (lengths or steps[0].granted):
            break
    assert fcfs.scheduler.num_preemptions == program.scheduler.num_preemptions


async def test_a_request_that_lacks_blocks_without_headroom_does_not_wait_for_headroom() -> None:
    agents = Agents(num_blocks=41, max_model_len=160, max_num_batched_tokens=200)
    agents.story.add("first", prompt(40, first=300), max_tokens=60)
    await agents.step()
    agents.story.add("large", prompt(130, first=600), max_tokens=2)
    assert (await agents.story.scheduler.schedule()).wait_reason is WaitReason.NO_BLOCKS


async def test_without_headroom_a_request_takes_the_last_blocks() -> None:
    agents = Agents(
        num_blocks=41, max_model_len=160, max_num_batched_tokens=200, retention_headroom=0.0
    )
    agents.story.add("first", prompt(20, first=300), max_tokens=60)
    await agents.step()
    large = agents.story.add("large", prompt(130, first=600), max_tokens=2)
    assert (await agents.story.scheduler.schedule()).new == [large]


@pytest.mark.parametrize(("num_tokens", "is_admitted"), [(60, True), (68, False)])
async def test_headroom_is_left_beside_contexts(num_tokens: int, is_admitted: bool) -> None:
    """Of 40 blocks, a context has 16 and may lose one, 6 are in use, and 4 must stay free."""
    agents, context, _ = await paused_and_running()
    agents.story.add("new", prompt(num_tokens, first=600), max_tokens=2)
    plan = await agents.story.scheduler.schedule()
    assert len(plan.new) == is_admitted
    assert plan.wait_reason is (None if is_admitted else WaitReason.RETAINED)
    assert agents.cached(context) == 64


@pytest.mark.parametrize("most", [32, 4])
async def test_requests_with_their_contexts_come_first_but_not_for_ever(most: int) -> None:
    """Two programs have contexts, and one of their turns waits or runs at any time."""
    agents = Agents(num_blocks=2001, max_num_seqs=1, max_model_len=800, max_warm_admissions=most)
    contexts = [await agents.turn(f"{first}", prompt(64, first)) for first in (100, 400)]
    cold = agents.story.add("cold", prompt(64, first=900), max_tokens=1)
    turns = [agents.story.add("0", [*one, 5], max_tokens=1) for one in contexts]
    num_turns = 0
    while not cold.is_finished:
        await agents.step()
        for index, turn in enumerate(turns):
            if turn.is_finished:
                num_turns += 1
                context = [*turn.token_ids, *prompt(3)]
                turns[index] = agents.story.add(f"{num_turns}", context, max_tokens=1)
    assert most <= num_turns <= most + 2


@pytest.mark.parametrize(("seconds", "first"), [(179.0, "short"), (181.0, "long")])
async def test_less_work_comes_first_unless_it_began_much_later(seconds: float, first: str) -> None:
    """Two applications have programs of 1,000 and 100 tokens. A token takes 0.1 s, so the programs
    are due 200 s and 20 s after they begin.
    """
    agents = Agents(num_blocks=2001, max_num_seqs=1, max_model_len=800)
    retention = agents.retention
    retention._due_times.turn_ended(10.0 * 500, 100 * 500)  # the mean counts 1/500 of it
    for name, first_token, num_tokens in (("long", 100, 1_000), ("short", 400, 100)):
        request = agents.story.add(name, prompt(64, first_token), max_tokens=1)
        application = retention._programs[request].application
        for _ in range(5):
            retention._ended.add(Program(application, 0.0, num_turns=1, num_tokens=num_tokens))
        agents.now += seconds
    plan = await agents.story.scheduler.schedule()
    assert [request.request_id for request in plan.new] == [first]


async def test_a_lost_context_is_remaining_work() -> None:
    """A turn of 65 tokens takes 0.65 s from its arrival. 64 of them are in full blocks. Tokens that
    are loaded from host memory, as three of four, are no work.
    """
    agents = Agents(max_model_len=160, max_num_batched_tokens=200)
    request = agents.story.add("one", prompt(61), max_tokens=4)
    while not request.is_finished:
        agents.now = 0.65
        await agents.story.step()
    await agents.story.step()
    again = agents.story.add("two", [*request.token_ids, *prompt(8, first=900)], max_tokens=1)
    due, began = agents.retention.due(again)
    assert began == 0.0
    agents.retention.forget()
    assert agents.retention.due(again)[0] - due == pytest.approx(2 * 0.64)
    agents.retention.worth.returned(num_loaded=3, num_recomputed=1)
    assert agents.retention.due(again)[0] - due == pytest.approx(2 * (0.65 / 4 - 0.01))


@pytest.mark.parametrize("interval", [1, 3])
async def test_one_of_some_admissions_is_of_the_longest_waiting(interval: int) -> None:
    """The first request has waited longest, but is last in the order of expected work."""
    agents = Agents(num_blocks=2001, max_num_seqs=1, max_model_len=800, aging_interval=interval)
    first = agents.story.add("first", prompt(64), max_tokens=1)
    assert first.program_turn is not None
    first.program_turn.began = 1e9
    others = [
        agents.story.add(f"{number}", prompt(64, first=90 * number), max_tokens=1)
        for number in range(1, 9)
    ]
    while not first.is_finished:
        await agents.step()
    assert sum(one.is_finished for one in others) == interval - 1


@pytest.mark.parametrize("idle_seconds", [600.0, 120.0])
def test_the_programs_that_are_known_are_bounded(idle_seconds: float) -> None:
    agents = Agents(program_idle_seconds=idle_seconds)
    retention = agents.retention
    for number in range(20):
        request = Request(f"{number}", number, prompt(16, first=20 * number), 16, SamplingParams())  # type: ignore[arg-type]
        retention.arrived(request)
        request.num_committed_blocks, request.known_to_pool = 4, True
        assert retention.ended(request) == ContextId(1 + number)
        agents.now += 60.0
    ages = [agents.now - one.paused_at for one in retention._contexts.values()]
    assert idle_seconds <= max(ages) <= idle_seconds + 60
    assert all(one > other for one, other in pairwise(ages))
    assert not retention._programs


async def test_after_a_loss_nothing_is_said_to_the_pool_about_contexts_that_were_lost() -> None:
    """An operator may abort all requests while the pool is lost, which sends pending operations."""
    agents = Agents()
    await agents.turn("one", prompt(16))
    (context,) = agents.retention._contexts
    agents.story.lose()
    num_transactions = agents.story.pool.num_transactions
    agents.story.scheduler.end_turn(context, "", ends=True)
    await agents.story.scheduler.flush()
    assert agents.story.pool.num_transactions == num_transactions
