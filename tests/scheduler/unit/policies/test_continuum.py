"""The policies `continuum-fixed` and `continuum-ttl` pin an agent's blocks for its next request."""

from typing import Any

import pytest

from services.common.request.finish import FinishReason
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.scheduler.core.input_chunk import InputChunk
from services.scheduler.core.policies.continuum.pins import Pins
from services.scheduler.core.request import Request
from tests.scheduler.story import Story, prompt

FIXED, TTL = "continuum-fixed", "continuum-ttl"
POOL = 41
"""The number of blocks of four tokens, of which one is the null block."""


class Agents:
    def __init__(self, policy: str = FIXED, **config: Any) -> None:
        self.story = Story(policy=policy, **{"num_blocks": POOL, "max_model_len": 160} | config)
        self.now = 0.0
        retention = self.story.scheduler.retention
        assert isinstance(retention, Pins)
        retention._clock = lambda: self.now
        self.pins = retention

    async def turn(
        self, first: int = 100, num_tokens: int = 31, after: Request | None = None, **fields: Any
    ) -> Request:
        """Runs a request to its end: a program's first turn, or the turn that continues `after`."""
        token_ids = prompt(num_tokens, first)
        if after is not None:
            token_ids = [*after.token_ids, *prompt(4, first)]
        request = self.story.add(f"{first}", token_ids, max_tokens=2, **fields)
        while not request.is_finished:
            await self.story.step()
        return request

    def tool(self, request: Request, tool: str = "sed", *, ends: bool = False) -> None:
        """Reports which tool a turn calls, or that the turn is the last of its program."""
        assert request.context is not None
        self.story.scheduler.end_turn(request.context, tool, ends=ends)

    async def pinned(self, first: int = 100, num_tokens: int = 31, **fields: Any) -> Request:
        request = await self.turn(first, num_tokens, **fields)
        self.tool(request)
        return request

    async def at(self, now: float) -> None:
        self.now = now
        await self.story.step()

    def holds(self, request: Request) -> bool:
        has_blocks = any(self.story.pool.core.block_tables(request.key))
        assert has_blocks == (request.key in self.pins.held)
        return has_blocks

    @property
    def num_free(self) -> int:
        return self.story.pool.core.num_free_blocks


# Which turns are pinned


async def test_a_turn_is_pinned_for_two_seconds_after_its_end() -> None:
    agents = Agents()
    request = await agents.pinned()
    assert request.is_finished
    await agents.at(1.9)
    assert agents.holds(request)
    assert agents.num_free == POOL - 1 - 8
    await agents.at(2.0)
    assert not agents.holds(request)
    assert agents.num_free == POOL - 1


async def test_without_a_tool_there_is_no_pin() -> None:
    agents = Agents()
    request = await agents.turn()
    agents.tool(request, "")
    await agents.at(0.1)
    assert not agents.holds(request)


async def test_a_tool_that_takes_more_than_two_seconds_on_average_gets_no_pin() -> None:
    agents = Agents()
    for seconds in (1.0, 4.0):
        request = await agents.pinned()
        agents.now += seconds
        agents.tool(await agents.turn(500, after=request), ends=True)
    request = await agents.pinned(300)
    await agents.at(agents.now)
    assert not agents.holds(request)


async def test_the_last_turn_is_not_pinned_and_ends_the_pin_of_its_program() -> None:
    agents = Agents()
    first = await agents.pinned()
    last = await agents.turn(500, after=first)
    assert agents.holds(first)
    agents.tool(last, ends=True)
    await agents.at(0.1)
    assert not agents.holds(first)
    assert not agents.holds(last)


async def test_a_request_without_a_program_is_not_pinned() -> None:
    agents = Agents(enable_prefix_caching=False)
    request = await agents.turn()
    assert request.context is None
    await agents.at(0.1)
    assert not agents.holds(request)


async def test_a_turn_that_was_aborted_is_not_pinned() -> None:
    agents = Agents()
    request = agents.story.add("aborted", prompt(32), max_tokens=9)
    await agents.story.step()
    agents.story.scheduler.abort(request)
    assert request.finish_reason is FinishReason.ABORT
    await agents.at(0.1)
    assert not agents.holds(request)


async def test_a_session_that_is_aborted_before_its_input_is_hashed_is_not_pinned() -> None:
    agents = Agents()
    session = agents.story.add("session", prompt(6), max_tokens=1, resumable=True)
    await agents.story.step()
    chunk = InputChunk(tuple(prompt(40, 700)), SamplingParams(max_tokens=2))
    agents.story.scheduler.add_chunk(session, chunk)
    agents.story.scheduler.abort(session)
    assert len(session.block_hashes) < session.num_prompt_tokens // 4
    await agents.at(0.1)
    assert not agents.holds(session)


async def test_until_the_tool_is_known_blocks_are_kept_for_half_a_second_at_most() -> None:
    agents = Agents()
    request = await agents.turn()
    await agents.at(0.4)
    assert agents.holds(request)
    await agents.at(0.5)
    assert not agents.holds(request)
    agents.tool(request)  # too late, the blocks are free
    await agents.at(0.6)
    assert not agents.holds(request)


async def test_a_client_may_say_which_tool_follows_and_that_none_does() -> None:
    agents = Agents()
    first = await agents.turn(program=DeclaredProgram("job", tool="sed"))
    await agents.at(1.9)
    assert agents.holds(first)
    last = await agents.turn(500, after=first, program=DeclaredProgram("job", ends=True))
    await agents.at(1.9)
    assert not agents.holds(first)
    assert not agents.holds(last)


# How long a pin lasts


async def test_a_new_pin_of_a_program_ends_the_earlier_one() -> None:
    agents = Agents()
    first = await agents.pinned()
    second = await agents.turn(500, after=first)
    assert agents.holds(first)
    assert agents.holds(second)
    agents.tool(second)
    await agents.at(0.1)
    assert not agents.holds(first)
    assert agents.holds(second)


async def test_a_turn_without_a_pin_leaves_the_earlier_pin_until_its_deadline() -> None:
    agents = Agents()
    first = await agents.pinned()
    agents.tool(await agents.turn(500, after=first), "")
    await agents.at(1.9)
    assert agents.holds(first)
    await agents.at(2.0)
    assert not agents.holds(first)


async def test_a_pin_outlives_its_deadline_while_the_next_turn_waits() -> None:
    agents = Agents(max_num_seqs=1)
    first = await agents.pinned()
    busy = agents.story.add("busy", prompt(4, first=700), max_tokens=20)
    await agents.story.step()
    following = agents.story.add("next", [*first.token_ids, 7], max_tokens=2)
    await agents.at(5.0)
    assert agents.holds(first)
    while not following.is_finished:
        await agents.at(5.0)
    assert busy.is_finished
    assert following.num_cached_tokens == 32
    await agents.at(5.0)
    assert not agents.holds(first)


# The order of admission


async def test_pinned_programs_come_first_and_then_the_oldest() -> None:
    agents = Agents(max_num_seqs=1, num_blocks=101)
    old = await agents.turn(100)
    agents.tool(old, "")
    agents.now = 1.0
    young = await agents.pinned(300)
    agents.story.add("busy", prompt(4, first=700), max_tokens=20)
    await agents.story.step()
    agents.now = 2.0
    agents.story.add("unknown", prompt(9, first=800), max_tokens=2)
    agents.story.add("old", [*old.token_ids, 7], max_tokens=2)
    agents.story.add("young", [*young.token_ids, 7], max_tokens=2)
    await agents.story.step()
    assert agents.story.waiting == ["young", "old", "unknown"]
    agents.story.scheduler.retention.release_all()  # type: ignore[union-attr]
    await agents.story.step()
    assert agents.story.waiting == ["old", "young", "unknown"]


async def test_requests_without_a_program_come_last() -> None:
    agents = Agents(max_num_seqs=1)
    agents.pins._config = agents.story.config
    queue = agents.story.scheduler.policy.create_request_queue()
    strange, known = await agents.turn(100), await agents.turn(300)
    agents.pins.arrived(known)
    for request in (strange, known):
        queue.add(request)
    queue.put_in_order()
    assert list(queue) == [known, strange]


# Preemption


async def running(agents: Agents, *programs: Request | int, max_tokens: int = 80) -> list[Request]:
    """Starts requests. A `Request` in `programs` is continued. An int begins a new program."""
    requests = []
    for number, one in enumerate(programs):
        token_ids = prompt(8, one) if isinstance(one, int) else [*one.token_ids, 7]
        requests.append(agents.story.add(f"{number}", token_ids, max_tokens=max_tokens))
        await agents.story.step()
    return requests


async def test_the_victim_is_the_last_request_whose_program_has_no_pin() -> None:
    agents = Agents(num_blocks=101)
    pinned = [await agents.pinned(first) for first in (100, 300)]
    requests = await running(agents, 500, pinned[0], 700, pinned[1])
    policy, scheduler = agents.story.scheduler.policy, agents.story.scheduler
    assert policy.victim(scheduler.running) is requests[2]
    for request in requests[::2]:
        scheduler.abort(request)
    assert policy.victim(scheduler.running) is requests[3]


async def test_pins_are_given_up_when_only_one_request_runs() -> None:
    agents = Agents()
    early = await agents.pinned(100)
    agents.now = 1.0
    late = await agents.pinned(300)
    (request,) = await running(agents, 500, max_tokens=110)
    while agents.holds(late):
        assert not request.is_finished
        await agents.story.step()
    assert agents.holds(early)
    while not request.is_finished:
        await agents.story.step()
    assert agents.story.scheduler.num_preemptions == 0


async def test_pins_are_kept_while_another_request_can_be_preempted() -> None:
    agents = Agents()
    pins = [await agents.pinned(first) for first in (100, 300)]
    await running(agents, 500, 700)
    while not agents.story.scheduler.num_preemptions:
        await agents.story.step()
    assert all(map(agents.holds, pins))
    assert agents.story.running == ["0"]


async def test_pins_are_given_up_for_the_head_of_the_queue_when_nothing_runs() -> None:
    agents = Agents()
    early = await agents.pinned(100)
    agents.now = 1.0
    late = await agents.pinned(300)
    agents.story.add("large", prompt(110, first=500), max_tokens=2)
    told = await agents.story.step()
    assert told.new == ["large"]
    assert agents.holds(early)
    assert not agents.holds(late)


async def test_turns_whose_tool_is_not_known_are_given_up_before_pins() -> None:
    agents = Agents()
    pinned, unknown = await agents.pinned(100), await agents.turn(300)
    agents.story.add("large", prompt(110, first=500), max_tokens=2)
    await agents.story.step()
    assert agents.holds(pinned)
    assert not agents.holds(unknown)


async def test_a_victim_that_the_step_has_scheduled_leaves_it() -> None:
    """Continuum's published code leaves the victim in the step, which has too many requests."""
    agents = Agents(num_blocks=21)
    pinned = await agents.pinned(100, num_tokens=15)
    await running(agents, 500, pinned, 700)
    while not agents.story.scheduler.num_preemptions:
        plan = await agents.story.scheduler.schedule()
        assert len(plan.requests) <= len(agents.story.scheduler.running)
        assert plan.num_tokens == sum(plan.num_scheduled_tokens)
        agents.story.take_in(plan, agents.story.model.run_plan(plan))


# The pool


async def test_a_reset_and_a_flush_free_all_pins() -> None:
    agents = Agents()
    request = await agents.pinned()
    assert await agents.story.scheduler.reset_prefix_cache()
    assert not agents.holds(request)
    request = await agents.pinned(300)
    await agents.story.scheduler.flush()
    assert not agents.holds(request)
    assert agents.num_free == POOL - 1


async def test_programs_outlive_the_pool_and_pins_do_not() -> None:
    agents = Agents()
    request = await agents.pinned()
    agents.story.lose()
    assert not agents.pins.held
    agents.now = 1.0
    following = await agents.turn(500, after=request)
    assert following.num_cached_tokens == 0
    assert list(agents.pins._times.pauses.all) == [1.0]


@pytest.mark.parametrize("policy", [FIXED, TTL])
async def test_the_programs_that_are_known_are_bounded(policy: str) -> None:
    agents = Agents(policy)
    for number in range(20):
        agents.now = 60.0 * number
        await agents.turn(40 * number)
    assert len(agents.pins._known._paused) == len(agents.pins._undecided) == 10
    assert not agents.pins._programs
    assert len(agents.pins.held) == len(agents.pins._pinned_of) == 1


# The policy of the paper, continuum-ttl


def slow_prompts(agents: Agents) -> Agents:
    for number in range(1, 20):
        agents.story.scheduler.step_costs.observe(number, number, 0.001)
        agents.story.scheduler.step_costs.observe(1, 101, 100.0)
    return agents


async def test_a_pin_ends_with_the_admission_of_the_next_turn() -> None:
    agents = slow_prompts(Agents(TTL, num_blocks=101))
    pinned = await agents.pinned()
    await agents.at(3.3)
    assert agents.holds(pinned)  # the pin lasts for ln 32 = 3.5 s
    (following,) = await running(agents, pinned)
    await agents.story.step()
    assert following.num_cached_tokens == 32
    assert not agents.holds(pinned)


async def test_where_nothing_is_gained_there_is_no_pin() -> None:
    agents = Agents(TTL)
    pinned = await agents.pinned()
    await agents.at(0.1)
    assert not agents.holds(pinned)


async def test_preempted_requests_come_before_those_of_pinned_programs() -> None:
    agents = slow_prompts(Agents(TTL))
    pinned = await agents.pinned()
    await running(agents, 500, 700)
    while not agents.story.scheduler.num_preemptions:
        await agents.story.step()
    agents.story.add("pinned", [*pinned.token_ids, 7], max_tokens=2)
    agents.story.add("new", prompt(9, first=800), max_tokens=2)
    agents.story.scheduler.queues.put_in_order()
    assert agents.story.waiting == ["1", "pinned", "new"]


async def test_the_victim_is_of_the_latest_program() -> None:
    agents = Agents(TTL, num_blocks=101)
    old = await agents.turn(100)
    agents.now = 1.0
    requests = await running(agents, 500)
    agents.now = 2.0
    requests += await running(agents, 700, old)
    victim = agents.story.scheduler.policy.victim(agents.story.scheduler.running)
    assert victim is requests[1]


async def test_pins_of_the_latest_programs_are_given_up_first() -> None:
    agents = slow_prompts(Agents(TTL))
    early = await agents.pinned(100, num_tokens=55)
    agents.now = 1.0
    late = await agents.pinned(300, num_tokens=19)
    agents.story.add("large", prompt(90, first=500), max_tokens=2)
    await agents.story.step()
    assert agents.holds(early)
    assert not agents.holds(late)


async def test_only_turns_whose_program_had_no_pin_measure_the_wait() -> None:
    agents = slow_prompts(Agents(TTL, max_num_seqs=1, num_blocks=101))
    pinned, other = await agents.pinned(100), await agents.turn(300)
    agents.tool(other, "")
    busy = agents.story.add("busy", prompt(4, first=700), max_tokens=20)
    await agents.story.step()
    for one in (pinned, other):
        agents.story.add("next", [*one.token_ids, 7], max_tokens=2)
    agents.story.add("new", prompt(9, first=800), max_tokens=2)
    agents.now = 3.0
    await agents.story.run()
    assert busy.is_finished
    assert list(agents.pins._times._waits) == [3.0]  # type: ignore[attr-defined]
