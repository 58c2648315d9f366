"""Measures the cost of LoRA adapters on the CPU: alternating steps with 0, 1, 4 and 16 adapters.

    python -m benchmarks.worker.adapter_price --model 135m --threads 2 --rounds 9

One model runner has 16 adapters of random weights in memory, on every projection. It repeats the
same steps, in turns: with requests without adapters, with one adapter, and with several adapters in
rotation. The steps are decodes of 1 and of 32 requests after prefixes of 128 tokens, and a prompt
of 512 tokens. The time of a turn is the median time of a few steps. The price is the ratio of a
turn's time to the time of the turn without adapters, as the median over rounds. On a machine with
other load, use --processor-time with one thread, which excludes the other programs' time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common.arguments import add_sized_model, make_parser
from benchmarks.common.console import show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from benchmarks.common.random_adapter import write_adapter
from benchmarks.worker.step_timer import StepsLoad, StepTimer, worker_for
from services.common.request.adapter import adapter_digest
from services.worker.core.worker import Worker

NUM_ADAPTERS = 16
LOADS = (
    (StepsLoad("decode, alone", 1, 128), (1,)),
    (StepsLoad("decode, 32 at once", 32, 128), (1, 4, 16)),
    (StepsLoad("prompt of 512 tokens", 1, 0, 512), (1,)),
)
"""Pairs of a load and the numbers of adapters with which it is measured."""


def main() -> None:
    parser = make_parser("worker.adapter_price", __doc__)
    add_sized_model(parser)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each number of adapters")
    parser.add_argument("--steps", type=int, default=16, help="steps of a turn")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count processor time in place of wall time; with one thread",
    )
    arguments = parser.parse_args()
    if arguments.processor_time and arguments.threads > 1:
        parser.error("argument --processor-time: needs --threads 1")
    torch.set_num_threads(arguments.threads)
    model = find_model(arguments.model)
    worker = build(model, arguments.rank, arguments.steps, arguments.threads)
    with tempfile.TemporaryDirectory(prefix="stepwell-adapters-") as directory:
        digests = load_adapters(worker, model, Path(directory), arguments.rank)
    show(machine_text(machine(), "worker.adapter_price"))
    clock = time.process_time if arguments.processor_time else time.perf_counter
    show(table(StepTimer(worker.runner, arguments.steps, clock), digests, arguments.rounds))


def table(timer: StepTimer, digests: Sequence[bytes], num_rounds: int) -> str:
    """Measures every load. The first round is a warm-up and is discarded."""
    lines = ["| load | adapters | without, ms | with, ms | price |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for load, numbers in LOADS:
        turns = [turn(timer, load, numbers, digests) for _ in range(num_rounds + 1)][1:]
        without = statistics.median(times[0] for times in turns)
        for index, number in enumerate(numbers, 1):
            adapted = statistics.median(times[index] for times in turns)
            price = statistics.median(times[index] / times[0] for times in turns) - 1
            lines.append(
                f"| {load.name} | {number} | {without:.2f} | {adapted:.2f} | {price:+.1%} |"
            )
    return "\n".join(lines)


def turn(
    timer: StepTimer, load: StepsLoad, numbers: Sequence[int], digests: Sequence[bytes]
) -> list[float]:
    """Returns the step times in milliseconds without adapters and with each of `numbers`."""
    return [
        timer.turn(load),
        *(timer.turn(load, digests[:number]) for number in numbers),
    ]


def load_adapters(worker: Worker, model: Path, directory: Path, rank: int) -> list[bytes]:
    """Writes adapters and loads them. Returns their digests."""
    if worker.adapters is None:
        raise ValueError("the model takes no adapters")
    digests = []
    for number in range(NUM_ADAPTERS):
        path = directory / str(number)
        write_adapter(model, path, rank=rank, seed=number)
        digests.append(adapter_digest(path))
        worker.adapters.load(digests[-1], path, digests)
    return digests


def build(model: Path, rank: int, num_steps: int, num_threads: int) -> Worker:
    """A worker that is large enough for every load and all adapters."""
    adapters = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": rank}
    loads = [load for load, _ in LOADS]
    return worker_for(model, loads, num_steps, num_threads=num_threads, **adapters)


if __name__ == "__main__":
    main()
