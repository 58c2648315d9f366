"""Time limits of steps follow from earlier steps that compute about as much."""

import pytest

from services.common.pool.ids import RequestKey
from services.common.request.sampling import SamplingParams
from services.scheduler.adapters.workers.steps_in_flight import StepsInFlight
from services.scheduler.core.engine.deadlines import Deadlines
from services.scheduler.core.output import SchedulerOutput
from services.scheduler.core.request import Request

FLOOR, CEILING = 2.0, 120.0
USUAL = 0.5


@pytest.fixture
async def steps() -> StepsInFlight:
    """Steps after a prompt of 600 tokens, whose step has taken the usual time."""
    deadlines = Deadlines(FLOOR, CEILING)
    steps = StepsInFlight("a", deadlines)
    step = steps.add(1, prefill(1, 600), CEILING)
    steps.forget(step)
    deadlines.took(step.size, USUAL)
    return steps


def prefill(number: int, count: int, computed: int = 0, **sampling: int) -> SchedulerOutput:
    """A step that computes the last `count` tokens of a prompt behind `computed` cached ones."""
    length = computed + count
    request = Request(
        str(number), RequestKey(number), [1] * length, length, SamplingParams(**sampling)
    )
    request.row = 0
    plan = SchedulerOutput(number, [request], [count], [computed], num_tokens=count)
    plan.block_tables[request] = ([],)
    return plan


def allowed_seconds(steps: StepsInFlight, plan: SchedulerOutput) -> float:
    return steps.add(1, plan).allowed_seconds


async def test_a_step_like_an_earlier_one_may_take_ten_times_as_long(steps: StepsInFlight) -> None:
    assert allowed_seconds(steps, prefill(2, 620)) == 10 * USUAL


async def test_tokens_behind_a_long_context_may_take_longer(steps: StepsInFlight) -> None:
    """Attention to a cached context of 40,000 tokens takes 18 times as long as the other work of
    these tokens (profiles/1.1b-xeon-amx-2-cores.toml).
    """
    assert allowed_seconds(steps, prefill(2, 600, computed=40_000)) == CEILING


async def test_log_probabilities_of_a_prompt_may_take_longer(steps: StepsInFlight) -> None:
    assert allowed_seconds(steps, prefill(2, 600, prompt_logprobs=0)) == CEILING
    assert allowed_seconds(steps, prefill(3, 600, logprobs=5)) == 10 * USUAL
