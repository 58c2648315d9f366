"""Recorded runs of agents' programs (sequences of requests with pauses for tool calls), by default
with the scheduling policy `program`.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool.ids import RequestKey
from services.common.request.program import DeclaredProgram
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput, WaitReason
from services.scheduler.core.ports import PoolLost
from services.scheduler.core.request import Request
from services.scheduler.core.step_log.log_entry import Entry
from services.scheduler.core.step_log.recorder import RecordingScheduler
from services.simulation.inprocess_pool import InProcessPool
from tests.scenarios.stand_in_model import next_token

MAX_MODEL_LEN = 60
TENANTS = b"", b"", bytes(16)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of an agent: one request. If `continues` is n, its prompt begins with the tokens of an
    ended turn: the last one for n = 0, the one before for n = 1. If there is no such turn, it
    begins a new sequence.
    """

    num_tokens: int
    max_tokens: int
    continues: int | None
    tool: str
    ends: bool
    pause: float
    program: DeclaredProgram | None = None


class Agents:
    """Runs turns on a recording scheduler with a simulated clock. Steps of more tokens take longer,
    and each reading of the clock takes `reading_seconds`. `losses` maps the step in which the pool
    is lost to the number of transactions that the pool still answers in this step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        turns: Sequence[Turn],
        losses: dict[int, int] | None = None,
        reading_seconds: float = 1e-6,
    ) -> None:
        self.config = config
        self.turns = turns
        self.now = 0.1
        self.entries: list[Entry] = []
        self.waits: Counter[WaitReason | None] = Counter()
        self._ended: list[Request] = []
        self._turns: dict[Request, Turn] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._losses = losses or {}
        self._reading_seconds = reading_seconds
        self._pool = InProcessPool(config)
        self.scheduler = RecordingScheduler(
            config, self._pool, self.entries.append, clock=self._clock
        )

    def _clock(self) -> float:
        self.now += self._reading_seconds
        return self.now

    async def run(self) -> None:
        """Adds up to two turns before every second step, and runs until all turns have ended."""
        turns = deque(self.turns)
        step = 0
        while turns or self.scheduler.has_work or self._in_flight:
            assert step < 2000
            for _ in range(min(len(turns), 2 * (step % 2 == 0))):
                self._add(turns.popleft())
            await self._step(step)
            step += 1

    def _add(self, turn: Turn) -> None:
        number = len(self._turns)
        tokens = [number, *range(turn.num_tokens - 1)]
        if turn.continues is not None and turn.continues < len(self._ended):
            earlier = self._ended[-1 - turn.continues].token_ids
            if len(earlier) + turn.num_tokens < MAX_MODEL_LEN - 12:
                tokens = [*earlier, *tokens]
        sampling = SamplingParams(max_tokens=turn.max_tokens)
        request = Request(
            f"r{number}",
            RequestKey(number + 1),
            tokens,
            len(tokens),
            sampling,
            program=turn.program,
            tenant=TENANTS[number % 3],
            tenant_weight=3.0 if TENANTS[number % 3] else 1.0,
            tenant_max_retained_share=0.3 if TENANTS[number % 3] else 1.0,
        )
        self._turns[request] = turn
        self.now += turn.pause
        self.scheduler.add(request)

    async def _step(self, step: int) -> None:
        self._pool.num_answers_left = self._losses.get(step)
        try:
            if self.scheduler.has_work:
                plan = await self.scheduler.schedule()
                self.waits[plan.wait_reason] += 1
                self._in_flight.append(plan)
        except PoolLost:
            self._in_flight.clear()
            self.scheduler.forget_pool()
            self._pool.reopen()
            return
        self._pool.num_answers_left = None
        depth = self.config.num_steps_in_flight
        if self._in_flight and not (len(self._in_flight) < depth and self._in_flight[-1].requests):
            self._update()

    def _update(self) -> None:
        plan = self._in_flight.popleft()
        tokens = [sampled_tokens(plan, index) for index in range(len(plan.requests))]
        seconds = 0.01 + 0.001 * len(plan.requests) + 0.003 * plan.num_tokens
        self.now += seconds
        ended = self.scheduler.update_from_output(plan, ModelRunnerOutput(tokens)).ended
        self.scheduler.step_costs.observe(len(plan.requests), plan.num_tokens, seconds)
        self._ended += ended
        for request in ended:
            if request.context is not None:
                turn = self._turns[request]
                self.scheduler.end_turn(request.context, turn.tool, ends=turn.ends)


def sampled_tokens(plan: SchedulerOutput, index: int) -> list[int]:
    request = plan.requests[index]
    end = plan.num_computed_tokens[index] + plan.num_scheduled_tokens[index]
    return [next_token(request.token_ids)] if end >= request.num_tokens else []


def configuration(
    policy: str = "program", *, num_blocks: int = 24, depth: int = 1
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_blocks=num_blocks,
        policy=policy,
        async_scheduling=depth == 2,
    )


def crowd() -> list[Turn]:
    """Sixty turns, too many to fit in the pool together. Every second turn names its program."""
    return [
        Turn(
            5 + number % 7,
            4 + number % 5,
            2 if number > 5 else None,
            "sed",
            number % 9 == 8,
            0.2,
            DeclaredProgram(f"job{number % 5}") if number % 2 else None,
        )
        for number in range(60)
    ]


async def crowded(policy: str = "program") -> Agents:
    agents = Agents(configuration(policy), crowd())
    await agents.run()
    return agents
