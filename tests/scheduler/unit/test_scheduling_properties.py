"""Runs random worlds (replicas with random requests and incidents, see tests/scheduler/worlds.py),
and checks invariants after each step.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, seed, settings

from services.common.pool.operations import Operation, Outcome
from services.common.request.finish import FinishReason
from services.scheduler.core import ports
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from tests.scheduler.invariants import Before, check_step
from tests.scheduler.paged_model import continuation
from tests.scheduler.story import Story
from tests.scheduler.worlds import Arrival, Event, Incident, World, worlds

NUM_WORLDS = 3300
KINDS = [(policy, in_flight) for policy in POLICIES for in_flight in (1, 2)]
RARE = ("preemptions", "hits", "drafts", "STOP", "ABORT")
MAX_STEPS = 1500
"""No world needs this many steps. A request that has not ended after them starves."""


class MortalPool:
    def __init__(self, pool: InProcessPool) -> None:
        self._pool = pool
        self._transactions_left: int | None = None

    def die_after(self, num_transactions: int) -> None:
        self._transactions_left = num_transactions

    def live(self) -> None:
        self._transactions_left = None

    async def transact(self, operations: Sequence[Operation], traceparent: str = "") -> Outcome:
        if self._transactions_left is not None:
            if self._transactions_left == 0:
                raise ports.PoolLost("the pool is away")
            self._transactions_left -= 1
        return await self._pool.transact(operations, traceparent)


@dataclass(slots=True)
class Life:
    """Runs a world, and checks it after each step."""

    world: World
    happened: Counter[str]
    """How often each kind of event has happened, in all worlds so far."""
    requests: list[tuple[Arrival, Request]] = field(default_factory=list)
    paused_until: int = 0
    story: Story = field(init=False)
    pool: MortalPool = field(init=False)

    def __post_init__(self) -> None:
        self.story = Story(**self.world.config, through=self._mortal)

    def _mortal(self, pool: InProcessPool) -> MortalPool:
        self.pool = MortalPool(pool)
        return self.pool

    async def live(self) -> None:
        step = 0
        while step <= self.world.last_step or self.story.has_work:
            assert step < MAX_STEPS, f"{self.story.running} and {self.story.waiting} do not end"
            self._arrive(step)
            try:
                await self._step(step)
            except ports.PoolLost:
                self.pool.live()
                self.story.lose()
            step += 1
        self.pool.live()
        await self.story.scheduler.flush()  # frees blocks that the policy keeps for ended requests
        self._check_ends()
        self._count(step)

    def _arrive(self, step: int) -> None:
        for arrival in self.world.arrivals:
            if arrival.step == step:
                request = self.story.add(
                    f"r{len(self.requests)}",
                    arrival.token_ids,
                    num_prompt_tokens=arrival.num_prompt_tokens,
                    max_tokens=arrival.max_tokens,
                    stop=arrival.ending_token_ids,
                    priority=arrival.priority,
                    cache_salt=arrival.salt,
                    reads_prefix_cache=arrival.reads_prefix_cache,
                )
                self.requests.append((arrival, request))

    async def _step(self, step: int) -> None:
        for event in self.world.events:
            if event.step == step:
                await self._suffer(event)
        self._abort(step, mid_step=False)
        if step < self.paused_until:
            self.story.take_in_all()
            self._abort(step, mid_step=True)
            return
        before = Before.of(self.story)

        def planned(plan: SchedulerOutput) -> None:
            check_step(self.story, before, plan)
            self.happened["drafts"] += sum(map(len, plan.draft_token_ids.values()))
            self._abort(step, mid_step=True)

        await self.story.step(planned)

    async def _suffer(self, event: Event) -> None:
        scheduler = self.story.scheduler
        self.happened[event.incident.name] += 1
        match event.incident:
            case Incident.PREEMPT:
                self.story.take_in_all()
                scheduler.preempt_all()
            case Incident.RESET:
                self.story.take_in_all()
                scheduler.preempt_all()
                assert await scheduler.reset_prefix_cache()
                assert self.story.pool.core.num_cached_hashes == 0
            case Incident.REFUSED_RESET:
                self.story.take_in_all()
                assert await scheduler.reset_prefix_cache() is not bool(scheduler.running)
            case Incident.PAUSE | Incident.PAUSE_AND_ABORT:
                self.story.take_in_all()
                self.paused_until = event.step + event.count
                if event.incident is Incident.PAUSE_AND_ABORT:
                    for _, request in self.requests:
                        scheduler.abort(request)
                    await scheduler.flush()
            case Incident.LOSS:
                self.story.lose()
            case Incident.LOSS_MID_STEP:
                self.pool.die_after(event.count)

    def _abort(self, step: int, *, mid_step: bool) -> None:
        for arrival, request in self.requests:
            if arrival.abort_at == step and arrival.abort_mid_step is mid_step:
                self.story.scheduler.abort(request)

    def _check_ends(self) -> None:
        """Asserts that all requests ended with the right tokens and reasons, and freed their
        blocks.
        """
        for arrival, request in self.requests:
            expected, reason = self._expected(arrival)
            if request.finish_reason is FinishReason.ABORT:
                assert self._was_given_up(arrival)
                assert request.token_ids == expected[: len(request.token_ids)]
            else:
                assert request.finish_reason is reason
                assert request.token_ids == expected
        assert self.story.pool.core.num_free_blocks == self.story.config.num_blocks - 1
        assert self.story.pool.core.stats().num_requests == 0
        assert self.story.model.num_requests == 0

    def _expected(self, arrival: Arrival) -> tuple[list[int], FinishReason]:
        prompt = arrival.token_ids[: arrival.num_prompt_tokens]
        room = self.story.config.max_model_len - len(prompt)
        token_ids = prompt + continuation(prompt, min(arrival.max_tokens, room))
        for end in range(len(arrival.token_ids), len(token_ids)):
            if token_ids[end] in arrival.ending_token_ids:
                return token_ids[: end + 1], FinishReason.STOP
        return token_ids, FinishReason.LENGTH

    def _was_given_up(self, arrival: Arrival) -> bool:
        return arrival.abort_at is not None or any(
            event.incident is Incident.PAUSE_AND_ABORT for event in self.world.events
        )

    def _count(self, num_steps: int) -> None:
        self.happened["worlds"] += 1
        self.happened["steps"] += num_steps
        self.happened["preemptions"] += self.story.scheduler.num_preemptions
        for _, request in self.requests:
            assert request.finish_reason is not None
            self.happened[request.finish_reason.name] += 1
            self.happened["hits"] += bool(request.num_cached_tokens)


@pytest.mark.parametrize(
    ("policy", "in_flight"), KINDS, ids=[f"{policy}-{depth}" for policy, depth in KINDS]
)
def test_every_world_ends_well(policy: str, in_flight: int) -> None:
    happened: Counter[str] = Counter()

    @seed(KINDS.index((policy, in_flight)))
    @settings(max_examples=NUM_WORLDS // len(KINDS))
    @given(worlds(policy=policy, async_scheduling=in_flight == 2))
    def live(world: World) -> None:
        asyncio.run(Life(world, happened).live())

    live()
    assert happened["worlds"] >= NUM_WORLDS // len(KINDS)
    for rare in (*(incident.name for incident in Incident), *RARE):
        assert happened[rare] >= 20, f"{rare} hardly happened: {happened}"
