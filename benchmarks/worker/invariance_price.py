"""What --batch-invariant costs torch's kernels on the CPU: steps with it and without, in turns.

    python -m benchmarks.worker.invariance_price --model 135m --threads 2 --rounds 9

Two runners over the same model run the same steps, one after the other: decodes of 1 and of 32
requests behind prefixes of 128 and of 600 tokens, and a prompt of 512. A turn is a few steps, of
which the median counts; the price is the median over rounds of one turn's time to the other's.
Native kernels are left out, since they are batch-invariant in any case.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.arguments import make_parser
from benchmarks.common.console import show
from benchmarks.common.models import find_model
from services.common.sampling import SamplingParams
from services.worker.build import build_worker
from services.worker.core.step import NewRequest, StepInput
from services.worker.core.worker import StepRunner
from services.worker.models.config import DtypeSetting
from services.worker.platforms.cpu_kernels import KernelsSetting
from services.worker.settings import WorkerSettings

BLOCK_SIZE = 16
MODES = (False, True)
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class StepsLoad:
    """Steps of so many requests, each of `num_tokens` tokens behind a prefix."""

    name: str
    num_requests: int
    num_prefix: int
    num_tokens: int = 1

    def num_blocks(self, num_steps: int) -> int:
        """Blocks of one request that runs so many steps."""
        return -(-(self.num_prefix + self.num_tokens + num_steps) // BLOCK_SIZE)


LOADS = (
    StepsLoad("decode, alone behind 128 tokens", 1, 128),
    StepsLoad("decode, alone behind 600 tokens", 1, 600),
    StepsLoad("decode, 32 behind 128 tokens", 32, 128),
    StepsLoad("decode, 32 behind 600 tokens", 32, 600),
    StepsLoad("prompt of 512 tokens", 1, 0, 512),
)


class StepTimer:
    """Runs a load's steps on one runner. The keys and values of prefixes are zeros: what attention
    reads takes the same time whatever it is.
    """

    def __init__(self, runner: StepRunner, num_steps: int) -> None:
        self._runner = runner
        self._num_steps = num_steps
        self._generation = 0

    def turn(self, load: StepsLoad) -> float:
        """The median time of a step in milliseconds. A prompt is a step of a batch of its own;
        decodes follow one that is not timed.
        """
        if load.num_tokens > 1:
            return _median_millis([self._first_step(load) for _ in range(self._num_steps)])
        self._first_step(load)
        return _median_millis([self._run(load, number) for number in range(1, self._num_steps)])

    def _first_step(self, load: StepsLoad) -> float:
        self._begin(load)
        return self._run(load, 0)

    def _run(self, load: StepsLoad, number: int) -> float:
        """Runs step `number` of the load; the seconds that it takes."""
        step = self._step(load, number)
        began = time.perf_counter()
        self._runner.execute(step)
        return time.perf_counter() - began

    def _begin(self, load: StepsLoad) -> None:
        """A new generation, with zeros in every block that the load uses."""
        self._generation += 1
        none = np.empty(0, np.int32)
        count = load.num_requests * load.num_blocks(self._num_steps)
        zeroed = np.arange(1, 1 + count, dtype=np.int32)
        self._runner.execute(
            StepInput(self._generation, 0, none, none, none, block_ids_to_zero=zeroed)
        )

    def _step(self, load: StepsLoad, number: int) -> StepInput:
        count = load.num_requests
        return StepInput(
            generation=self._generation,
            step=1 + number,
            rows=np.arange(count, dtype=np.int32),
            num_scheduled_tokens=np.full(count, load.num_tokens, np.int32),
            num_computed_tokens=np.full(count, load.num_prefix + number, np.int32),
            new_requests=() if number else self._requests(load),
        )

    def _requests(self, load: StepsLoad) -> tuple[NewRequest, ...]:
        length, width = load.num_prefix + load.num_tokens, load.num_blocks(self._num_steps)
        tables = np.arange(1, 1 + load.num_requests * width, dtype=np.int32).reshape(-1, width)
        tokens = np.random.default_rng(0).integers(3, 256, (load.num_requests, length), np.int32)
        return tuple(
            NewRequest(row, tokens[row], length, GREEDY, (tables[row],))
            for row in range(load.num_requests)
        )


def _median_millis(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds)


def main() -> None:
    """Prints a table."""
    parser = make_parser("worker.invariance_price", (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default="135m", help="a directory, or the size of a random model"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=16, help="steps of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, dtype = find_model(arguments.model), DtypeSetting(arguments.dtype)
    timers = [
        StepTimer(build(model, dtype, mode, arguments.steps), arguments.steps) for mode in MODES
    ]
    show(table(timers, arguments.rounds))


def table(timers: list[StepTimer], num_rounds: int) -> str:
    """Measures every load, after a round that does not count."""
    rows = [
        "| load | not batch-invariant, ms | batch-invariant, ms | price |",
        "| --- | ---: | ---: | ---: |",
    ]
    for load in LOADS:
        turns = [rounds(timers, load, number) for number in range(num_rounds + 1)][1:]
        without, invariant = (statistics.median(times) for times in zip(*turns, strict=True))
        price = statistics.median(pair[1] / pair[0] for pair in turns) - 1
        rows.append(f"| {load.name} | {without:.2f} | {invariant:.2f} | {price:+.1%} |")
    return "\n".join(rows)


def rounds(timers: list[StepTimer], load: StepsLoad, number: int) -> tuple[float, float]:
    """A turn of each mode, the other one first in every second round."""
    if number % 2:
        invariant, without = timers[1].turn(load), timers[0].turn(load)
    else:
        without, invariant = (timer.turn(load) for timer in timers)
    return without, invariant


def build(model: Path, dtype: DtypeSetting, batch_invariant: bool, num_steps: int) -> StepRunner:
    """A runner over torch's kernels that can hold every load."""
    most = max(load.num_requests * load.num_blocks(num_steps) for load in LOADS)
    settings = WorkerSettings(
        model=model,
        dtype=dtype,
        kernels=KernelsSetting.TORCH,
        batch_invariant=batch_invariant,
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        num_blocks=1 + most,
    )
    return build_worker(settings, "benchmark", lambda: None).runner


if __name__ == "__main__":
    main()
