"""Measures the cost of --batch-invariant with torch's kernels on the CPU, in alternating steps.

    python -m benchmarks.worker.invariance_price --model 135m --threads 2 --rounds 9

Two model runners, with and without --batch-invariant, alternate on the same steps. The steps are
decodes of 1 and of 32 requests after prefixes of 128 and of 600 tokens, and a prompt of 512 tokens.
In each round each runner computes a few steps, and the result is their median time. The price is
the ratio of the two runners' times, as the median over rounds. Native kernels are not measured,
since they are always batch-invariant.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from benchmarks.common.arguments import add_sized_model, make_parser
from benchmarks.common.console import show
from benchmarks.common.models import find_model
from benchmarks.worker.step_timer import StepsLoad, StepTimer, turn_of_each, worker_for
from services.worker.backends.choices import KernelsSetting
from services.worker.core.worker import StepRunner
from services.worker.models.config import DtypeSetting

MODES = (False, True)


LOADS = (
    StepsLoad("decode, alone behind 128 tokens", 1, 128),
    StepsLoad("decode, alone behind 600 tokens", 1, 600),
    StepsLoad("decode, 32 behind 128 tokens", 32, 128),
    StepsLoad("decode, 32 behind 600 tokens", 32, 600),
    StepsLoad("prompt of 512 tokens", 1, 0, 512),
)


def main() -> None:
    parser = make_parser("worker.invariance_price", __doc__)
    add_sized_model(parser)
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
    """Measures every load. The first round is a warm-up and is discarded."""
    rows = [
        "| load | not batch-invariant, ms | batch-invariant, ms | price |",
        "| --- | ---: | ---: | ---: |",
    ]
    for load in LOADS:
        turns = [turn_of_each(timers, load, number) for number in range(num_rounds + 1)][1:]
        without, invariant = (statistics.median(times) for times in zip(*turns, strict=True))
        price = statistics.median(pair[1] / pair[0] for pair in turns) - 1
        rows.append(f"| {load.name} | {without:.2f} | {invariant:.2f} | {price:+.1%} |")
    return "\n".join(rows)


def build(model: Path, dtype: DtypeSetting, batch_invariant: bool, num_steps: int) -> StepRunner:
    """A runner with torch's kernels that is large enough for every load."""
    settings = {"kernels": KernelsSetting.TORCH, "batch_invariant": batch_invariant}
    return worker_for(model, LOADS, num_steps, dtype=dtype, **settings).runner


if __name__ == "__main__":
    main()
