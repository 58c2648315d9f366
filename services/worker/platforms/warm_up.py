"""Steps before the first request, so that its steps are as fast as later ones."""

from collections.abc import Callable

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.core.input_batch import BatchLimits
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput

WARM_UP_TOKENS = 256
"""Most prompt tokens of a warm-up step: enough to touch every weight and kernel."""


def warm_up(runner: ModelRunner, limits: BatchLimits, progress: Callable[[int, int], None]) -> None:
    """Runs a prompt, a chunk after it and decodes, then empties the batch.

    The KV-cache groups overwrite each other's blocks. The outputs are discarded.
    `progress` is called with the number of steps done and the number there are.
    """
    capacity = min(limits.max_model_len, (limits.num_blocks - 1) * limits.block_size)
    prompt = min(WARM_UP_TOKENS, limits.max_num_batched_tokens, capacity - 1)
    first = max(prompt // 2, 1)
    chunks = [(0, first), (first, prompt - first), (prompt, 1)]
    steps = [(start, count) for start, count in chunks if count > 0 and start + count <= capacity]
    for number, (start, count) in enumerate(steps):
        runner.execute(_step(limits, number, prompt, start, count))
        progress(number + 1, len(steps))
    runner.reset()


def _step(
    limits: BatchLimits, number: int, prompt: int, num_computed: int, num_scheduled: int
) -> StepInput:
    blocks = -(-(prompt + 1) // limits.block_size)
    request = NewRequest(
        row=0,
        token_ids=np.zeros(prompt, np.int32),
        num_prompt_tokens=prompt,
        sampling=SamplingParams(temperature=0),
        block_tables=(np.arange(1, blocks + 1, dtype=np.int32),) * len(limits.windows),
    )
    return StepInput(
        generation=0,
        step=number,
        rows=np.zeros(1, np.int32),
        num_scheduled_tokens=np.array([num_scheduled], np.int32),
        num_computed_tokens=np.array([num_computed], np.int32),
        new_requests=(request,) if number == 0 else (),
    )
