"""Helpers for worked examples of scheduling: requests have names, and steps are recorded."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.kvpool.core.kv_pool import KVPool as PoolCore
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.planning.scheduler import Scheduler
from services.scheduler.core.ports import KVPool
from services.scheduler.core.request import Request
from services.simulation.inprocess_pool import InProcessPool
from tests.scheduler.paged_model import PagedModel

BLOCK_SIZE = 4


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    """A prompt of consecutive token ids. Prompts with different `first` share no block."""
    return [(first + offset) % 1000 for offset in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The results of a step. Requests are identified by name."""

    granted: dict[str, int]
    """Number of scheduled tokens of each request, in scheduling order."""
    start: dict[str, int]
    """Number of computed tokens of each request before the step."""
    blocks: dict[str, list[int]]
    """Blocks of the first KV-cache group: the whole block table of an admitted request, and the new
    blocks of any other request.
    """
    new: list[str]
    resumed: list[str]
    preempted: list[str]
    zeroed: list[int]
    """Blocks that are zeroed before the step."""
    round_trips: int
    tokens: dict[str, list[int]]
    """The sampled tokens of each request that sampled tokens or ended."""


class Story:
    """A scheduler and the real core of the KV pool. `through` may wrap it. Records each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = BLOCK_SIZE,
        through: Callable[[InProcessPool], KVPool] = lambda pool: pool,
        **config: Any,
    ) -> None:
        limits: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 100,
            "max_model_len": 400,
            "enable_prefix_caching": True,
        }
        self.config = SchedulerConfig(
            block_size=block_size, num_blocks=num_blocks, **limits | config
        )
        self.pool = InProcessPool(self.config)
        self.scheduler = Scheduler(self.config, through(self.pool))
        self.model = self._new_model()
        self._num_requests = 0
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 100,
        eos: Iterable[int] = (),
        stop: Iterable[int] = (),
        repetition: RepetitionDetection | None = None,
        min_tokens: int = 0,
        **fields: Any,
    ) -> Request:
        self._num_requests += 1
        fields = {"num_prompt_tokens": len(token_ids), "arrival_time": self._num_requests} | fields
        request = Request(
            request_id=name,
            key=self._num_requests,
            token_ids=list(token_ids),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                eos_token_ids=tuple(eos),
                stop_token_ids=tuple(stop),
                repetition_detection=repetition,
                min_tokens=min_tokens,
            ),
            **fields,
        )
        self.scheduler.add(request)
        return request

    async def step(
        self, meanwhile: Callable[[SchedulerOutput], None] = lambda _: None
    ) -> StepRecord:
        """Plans a step and calls `meanwhile` with the plan. Then processes the output of the step
        or, with asynchronous scheduling, of the step before. Checks the pool's invariants.
        """
        before = self.pool.num_transactions
        plan = await self.scheduler.schedule()
        round_trips = self.pool.num_transactions - before
        self.pool.core.check()
        if plan.requests or plan.removed_rows:
            self._in_flight.append((plan, self.model.run_plan(plan)))
        meanwhile(plan)
        depth = 2 if self.config.async_scheduling else 1
        tokens: dict[str, list[int]] = {}
        if self._in_flight and (len(self._in_flight) >= depth or not plan.requests):
            tokens = self.take_in(*self._in_flight.popleft())
        ids = names(plan.requests)
        return StepRecord(
            granted=dict(zip(ids, plan.num_scheduled_tokens, strict=True)),
            start=dict(zip(ids, plan.num_computed_tokens, strict=True)),
            blocks={
                request.request_id: tables[0]
                for part in (plan.block_tables, plan.appended_blocks)
                for request, tables in part.items()
            },
            new=names(plan.new),
            resumed=names(plan.resumed),
            preempted=names(plan.preempted),
            zeroed=list(plan.block_ids_to_zero),
            round_trips=round_trips,
            tokens=tokens,
        )

    def take_in(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, list[int]]:
        """Processes the output of a plan. Returns the tokens of requests that sampled or ended."""
        updates = self.scheduler.update_from_output(plan, output)
        return {update.request.request_id: list(update.token_ids) for update in updates}

    def take_in_all(self) -> None:
        while self._in_flight:
            self.take_in(*self._in_flight.popleft())

    def lose(self) -> None:
        self._in_flight.clear()
        self.scheduler.forget_pool()
        self.pool.core = PoolCore(self.pool.core.config)
        self.model = self._new_model()

    async def steps(self, count: int) -> list[StepRecord]:
        return [await self.step() for _ in range(count)]

    async def run(self, max_steps: int = 1000) -> list[StepRecord]:
        """Runs steps until nothing is left to compute or to send to the pool and the workers."""
        told = []
        while self.has_work:
            told.append(await self.step())
            assert len(told) < max_steps, "a request starves"
        return told

    def _new_model(self) -> PagedModel:
        config = self.config
        return PagedModel(
            config.block_size, config.max_num_seqs, config.num_speculative_tokens, config.groups
        )

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    @property
    def running(self) -> list[str]:
        """The names of running requests, in admission order."""
        return names(self.scheduler.running)

    @property
    def waiting(self) -> list[str]:
        """The names of waiting requests, the head of the queue first."""
        return names(self.scheduler.queues.waiting)


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
