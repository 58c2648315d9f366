"""The policy `program` with a KV connector. The blocks of an ended turn become a paused context (KV
blocks retained for the program's next turn). The tests show when, and when a load may use blocks of
paused contexts.
"""

from collections import deque
from typing import Any

from services.common.pool.ids import RequestKey
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import KVRole
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput, WaitReason
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.connector import ExternalTokens, connected
from tests.scenarios.stand_in_connector import StandInConnector
from tests.scheduler.story import prompt


class Run:
    """A scheduler with a KV connector. Each step takes a tenth of a second of simulated time."""

    def __init__(
        self,
        sources: dict[RequestKey, ExternalTokens] | None = None,
        send_steps: dict[RequestKey, int] | None = None,
        **config: Any,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=64,
            block_size=4,
            num_blocks=21,
            policy="program",
            kv_role=KVRole.BOTH,
            **config,
        )
        self.now = 0.0
        self.connector = StandInConnector(4, sources or {}, send_steps or {})
        self.pool = InProcessPool(self.config)
        self.scheduler = Scheduler(
            self.config, self.pool, connected(self.connector), lambda: self.now
        )
        for _ in range(20):  # a prompt token is estimated to cost a second
            self.scheduler.step_costs.observe(1, 1, 1.0)
            self.scheduler.step_costs.observe(1, 101, 101.0)
        self.scheduler.retention._due_times.continuing = (
            1.0  # as if the programs before had many turns
        )
        self._in_flight: deque[SchedulerOutput] = deque()

    def add(self, key: int, token_ids: list[int], max_tokens: int) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(f"r{key}", RequestKey(key), token_ids, len(token_ids), sampling)
        self.scheduler.add(request)
        return request

    async def step(self) -> SchedulerOutput:
        self.now += 0.1
        plan = await self.scheduler.schedule()
        self.pool.core.check()
        self._in_flight.append(plan)
        if len(self._in_flight) >= self.config.num_steps_in_flight or not plan.requests:
            self.take_in()
        return plan

    def take_in(self) -> None:
        plan = self._in_flight.popleft()
        self.connector.step += 1
        ends = zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        tokens = [
            [7] if start + count >= request.num_tokens else []
            for request, (start, count) in zip(plan.requests, ends, strict=True)
        ]
        results = self.connector.results(plan.step)
        self.scheduler.update_from_output(plan, ModelRunnerOutput(tokens, kv_transfers=results))

    async def until_ended(self, request: Request) -> None:
        while not request.is_finished:
            await self.step()

    @property
    def contexts(self) -> dict[int, int]:
        """Maps each paused context that the pool has to its number of blocks."""
        found = self.pool.core._blocks.contexts
        return {} if found is None else {one: len(of) for one, of in found._contexts.items()}


async def test_blocks_that_a_step_in_flight_writes_become_a_context_after_it() -> None:
    run = Run(async_scheduling=True)
    request = run.add(1, prompt(9), 20)
    await run.step()
    await run.step()
    run.scheduler.abort(request)
    assert request.context is not None
    plan = await run.step()
    assert (plan.requests, run.contexts) == ([], {}), "a step in flight may write its blocks"
    await run.step()
    await run.step()
    assert run.contexts == {request.context: 2}


async def test_blocks_that_are_sent_become_a_context_afterwards() -> None:
    run = Run(send_steps={RequestKey(1): 3})
    request = run.add(1, prompt(9), 2)
    await run.until_ended(request)
    for _ in range(3):
        await run.step()
        assert run.pool.core.num_free_blocks < 20
        assert run.contexts == {}
    await run.step()
    assert run.pool.core.num_free_blocks == 20
    assert run.contexts == {request.context: 2}


async def test_a_context_that_is_dropped_while_its_blocks_are_sent_is_dropped_again() -> None:
    run = Run(send_steps={RequestKey(1): 4})
    first = run.add(1, prompt(9), 2)
    await run.until_ended(first)
    second = run.add(2, [*first.token_ids, 1, 2], 20)
    plan = await run.step()
    assert plan.new == [second]
    assert second.num_cached_tokens == 8
    for _ in range(8):
        await run.step()
    assert run.contexts == {}
    await run.until_ended(second)
    await run.step()
    assert list(run.contexts) == [second.context]


async def test_a_load_leaves_headroom_beside_running_requests() -> None:
    run = Run({RequestKey(2): ExternalTokens(64, is_async=True)})
    run.add(1, prompt(9, first=400), 12)
    await run.step()
    loaded = run.add(2, prompt(66, first=600), 2)
    plan = await run.step()
    assert (plan.wait_reason, plan.loads) == (WaitReason.HEADROOM, [])
    await run.until_ended(loaded)
    assert loaded.num_cached_tokens == 64


async def test_a_load_waits_while_the_context_that_it_needs_is_worth_more() -> None:
    run = Run({RequestKey(3): ExternalTokens(36, is_async=True)})
    paused = run.add(1, prompt(45), 2)
    await run.until_ended(paused)
    run.add(2, prompt(4, first=400), 12)
    await run.step()
    loaded = run.add(3, prompt(38, first=600), 2)
    plan = await run.step()
    assert (plan.wait_reason, plan.loads) == (WaitReason.RETAINED, [])
    assert plan.retained.startswith("kept ")
    assert run.contexts == {paused.context: 11}
    await run.until_ended(loaded)
    assert loaded.num_cached_tokens == 36, "it takes the blocks once nothing else runs"
