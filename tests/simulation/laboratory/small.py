"""Small setups and programs for tests of the laboratory, which simulates policies."""

from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.core.config import SchedulerConfig
from services.simulation.laboratory.programs import Program, Turn
from services.simulation.laboratory.run import Setup
from services.worker.core.step_times import StepCosts, StepTimes

UNIT = StepTimes(StepCosts(seconds=1.0), StepCosts(seconds=1.0, seconds_per_token=0.1))
"""A decode step takes a second. A step with prompts takes 0.1 s more for each of its tokens."""


def setup(num_blocks: int = 1_001, times: StepTimes = UNIT, **config: object) -> Setup:
    small = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=16_000,
        block_size=16,
        num_blocks=num_blocks,
        async_scheduling=True,
    )
    return Setup(replace(small, **config), times)  # type: ignore[arg-type]


def program(number: int, arrival: float, *turns: tuple[int, int, float], **of: object) -> Program:
    """An agent's program. A turn is a request: its numbers of new tokens and of output tokens, and
    the seconds of pause before it.
    """
    return Program(number, arrival, tuple(Turn(*turn) for turn in turns), **of)  # type: ignore[arg-type]


def programs(*items: Program) -> Iterable[Program]:
    return items
