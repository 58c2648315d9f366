"""Random replicas with random requests: what must hold after every step, and at the end."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.kvpool.core.ids import RequestNumber
from services.scheduler.core.config import Policy
from services.scheduler.core.request import FinishReason, Request
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import Story, Told

MAX_PROMPT = 24
MAX_OUTPUT = 12


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is going to come."""

    step: int
    token_ids: list[int]
    num_output: int
    max_tokens: int
    priority: int
    salt: str
    reads_prefix_cache: bool
    abort_after: int | None


@dataclass(frozen=True, slots=True)
class World:
    """A replica and what will be asked of it."""

    config: dict[str, Any]
    arrivals: list[Arrival]
    told_to_preempt_all: frozenset[int]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that share prefixes: part of one of two stems, then tokens of their own."""
    stem = draw(st.integers(0, 1)) * 400 + 100
    shared = draw(st.integers(0, MAX_PROMPT - 4))
    own = draw(st.lists(st.integers(3, 6), min_size=1, max_size=4))
    return [*range(stem, stem + shared), *own]


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    token_ids = draw(prompts())
    num_output = draw(st.sampled_from([0, 0, 0, 2]))
    return Arrival(
        step=draw(st.integers(0, 12)),
        token_ids=token_ids + continuation(token_ids, num_output),
        num_output=num_output,
        max_tokens=num_output + draw(st.integers(1, MAX_OUTPUT - 2)),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from(["", "", "salt"])),
        reads_prefix_cache=draw(st.integers(0, 9)) != 0,
        abort_after=draw(st.one_of(st.none(), st.none(), st.integers(0, 10))),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    block_size = draw(st.integers(1, 5))
    whole = -(-(MAX_PROMPT + MAX_OUTPUT) // block_size)
    chunked = draw(st.integers(0, 4)) != 0
    longest = MAX_PROMPT + MAX_OUTPUT
    config = {
        "block_size": block_size,
        "num_blocks": 1 + whole + draw(st.integers(0, whole)),
        "max_model_len": longest,
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(1, 40)) if chunked else longest,
        "enable_chunked_prefill": chunked,
        "policy": draw(st.sampled_from(Policy)),
        "enable_prefix_caching": draw(st.integers(0, 3)) != 0,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5])),
        "long_prefill_token_threshold_adaptive": draw(st.booleans()),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
    }
    return World(
        config=config,
        arrivals=draw(st.lists(arrivals(), min_size=1, max_size=7)),
        told_to_preempt_all=frozenset(draw(st.lists(st.integers(1, 12), max_size=1))),
    )


@dataclass(slots=True)
class Run:
    """A world set going."""

    world: World
    story: Story
    alive: dict[str, tuple[Arrival, Request]] = field(default_factory=dict)

    async def to_the_end(self) -> None:
        step, last = 0, max(arrival.step for arrival in self.world.arrivals)
        while step <= last or self.story.has_work:
            assert step < 2000, f"{self.story.waiting} starve"
            self._happen(step)
            told = await self.story.step()
            self._check_limits(told)
            self._check_memory()
            step += 1
        self._check_ends()

    def _happen(self, step: int) -> None:
        for number, arrival in enumerate(self.world.arrivals):
            if arrival.step == step:
                name = f"r{number}"
                request = self.story.add(
                    name,
                    arrival.token_ids,
                    num_prompt_tokens=len(arrival.token_ids) - arrival.num_output,
                    max_tokens=arrival.max_tokens,
                    priority=arrival.priority,
                    cache_salt=arrival.salt,
                    reads_prefix_cache=arrival.reads_prefix_cache,
                )
                self.alive[name] = arrival, request
        for arrival, request in self.alive.values():
            if arrival.abort_after is not None and step == arrival.step + arrival.abort_after:
                self.story.scheduler.abort(request)
        if step in self.world.told_to_preempt_all:
            self.story.settle()
            self.story.scheduler.preempt_all()

    def _check_limits(self, told: Told) -> None:
        config = self.story.config
        assert sum(told.granted.values()) <= config.max_num_batched_tokens
        assert all(count > 0 for count in told.granted.values())
        assert len(self.story.running) <= config.max_num_seqs
        assert self.story.model.num_requests <= config.max_num_seqs
        assert not told.preempted or not (told.new or told.resumed)

    def _check_memory(self) -> None:
        """Blocks at or above what is computed have one holder; free + used = total."""
        core, size = self.story.pool.core, self.story.config.block_size
        core.check()
        tables = {
            request: core.block_tables(RequestNumber(request.key))[0]
            for _, request in self.alive.values()
        }
        holders = Counter(block for table in tables.values() for block in table)
        assert len(holders) + core.num_free_blocks == core.config.num_blocks - 1
        assert 0 not in holders
        for request in self.story.scheduler.running:
            written_next = tables[request][request.num_computed_tokens // size :]
            assert all(holders[block] == 1 for block in written_next), request.request_id

    def _check_ends(self) -> None:
        for arrival, request in self.alive.values():
            given = arrival.token_ids[: len(arrival.token_ids) - arrival.num_output]
            expected = given + continuation(given, arrival.max_tokens)
            assert request.is_finished
            if request.finish_reason is FinishReason.ABORT:
                assert arrival.abort_after is not None
                assert request.token_ids == expected[: len(request.token_ids)]
            else:
                assert request.finish_reason is FinishReason.LENGTH
                assert request.token_ids == expected
        assert self.story.pool.core.num_free_blocks == self.story.config.num_blocks - 1
        assert self.story.model.num_requests == 0


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_every_request_ends_with_its_own_tokens_and_leaves_nothing_behind(world: World) -> None:
    asyncio.run(Run(world, Story(**world.config)).to_the_end())
