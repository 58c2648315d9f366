"""Steps for a model runner, in which a few requests arrive, decode together and end."""

from collections import deque

import numpy as np

from services.common.request.sampling import SamplingParams
from services.worker.core.model_runner import ModelRunner
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import NewRequest, StepInput, StepOutput
from tests.worker.runner_driver import ints

PROMPT = [7, 8, 9, 10, 11]
DRAWN = SamplingParams(temperature=1.2, top_k=40, top_p=0.9, seed=11)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.3, seed=3)
WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=1, prompt_logprobs=0)


def new(row: int, sampling: SamplingParams, num_groups: int = 1) -> NewRequest:
    """A new request with PROMPT, and six blocks (at least 24 tokens) in each KV-cache group."""
    tables = (
        np.arange(1 + 6 * index, 7 + 6 * index, dtype=np.int32)
        for index in range(row * num_groups, (row + 1) * num_groups)
    )
    return NewRequest(row, ints(*PROMPT), len(PROMPT), sampling, tuple(tables))


def step(number: int, *entries: tuple[int, int, int], **changes) -> StepInput:
    """A step. Entries are (batch row, number of scheduled tokens, number of computed tokens)."""
    rows, scheduled, computed = zip(*entries, strict=True)
    return StepInput(1, number, ints(*rows), ints(*scheduled), ints(*computed), **changes)


def story(kinds: tuple[SamplingParams, ...], num_groups: int = 1) -> list[StepInput]:
    """Steps in which three requests decode. The second ends, and a fourth request gets its row of
    the batch. One prompt is computed in two chunks.
    """
    first, second, third, fourth = (
        new(row, kind, num_groups) for row, kind in zip((0, 1, 2, 1), kinds, strict=True)
    )
    steps = [step(0, (0, 5, 0), (1, 5, 0), new_requests=(first, second))]
    steps += [step(1, (0, 1, 5), (1, 1, 5))]
    steps += [step(2, (0, 1, 6), (1, 1, 6), (2, 3, 0), new_requests=(third,))]
    steps += [step(3, (0, 1, 7), (2, 2, 3), (1, 1, 7))]
    steps += [step(4, (1, 5, 0), (0, 1, 8), removed_rows=ints(1), new_requests=(fourth,))]
    steps += [step(5 + n, (2, 1, 5 + n), (0, 1, 9 + n), (1, 1, 5 + n)) for n in range(6)]
    return steps


def run_plainly(runner: ModelRunner, steps: list[StepInput]) -> list[StepOutput]:
    return [runner.execute(step) for step in steps]


def run_two_in_flight(runner: ModelRunner, steps: list[StepInput]) -> list[StepOutput]:
    """Runs steps. Each step begins before the output of the previous one is awaited."""
    outputs, flying = [], deque[StepOutput | PendingOutput]()
    for number in range(len(steps) + 1):
        if number < len(steps):
            flying.append(runner.begin(steps[number]))
        if len(flying) == 2 or number == len(steps):
            output = flying.popleft()
            outputs.append(output if isinstance(output, StepOutput) else output.wait())
    return outputs
