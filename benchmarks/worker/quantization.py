"""How fast a worker on the CPU is with weights of 8 and 4 bits: steps of each, in turns.

    python -m benchmarks.worker.quantization --model 1.1b --threads 2 --rounds 9

Three runners of one model: with its weights as they are stored, in 8 bits, and in 4 bits of groups
of 128 with a head of 8. Each runs the same steps again and again: decodes of 1, 4 and 16 requests
behind prefixes of 128 tokens, and a prompt of 512. A turn is a few steps, of which the median
counts; the ratio is the median over rounds of the time with stored weights to that with others.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.common.arguments import make_parser
from benchmarks.common.console import show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from benchmarks.common.quantized_model import write_int4_model
from benchmarks.worker.step_timer import BLOCK_SIZE, StepsLoad, StepTimer
from services.worker.build import build_worker
from services.worker.models.quantization import QuantizationSetting
from services.worker.settings import WorkerSettings

LOADS = (
    StepsLoad("decode, alone", 1, 128),
    StepsLoad("decode, 4 at once", 4, 128),
    StepsLoad("decode, 16 at once", 16, 128),
    StepsLoad("prompt of 512 tokens", 1, 0, 512),
)
STORED = "stored"


def main() -> None:
    """Prints a table."""
    parser = make_parser("worker.quantization", (__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default="135m", help="a directory, or the size of a random model"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each kind of weights")
    parser.add_argument("--steps", type=int, default=16, help="steps of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = find_model(arguments.model)
    timers = build_timers(model, arguments.steps, arguments.threads)
    show(machine_text(machine(), "worker.quantization"))
    show(table(timers, arguments.rounds))


def build_timers(model: Path, num_steps: int, num_threads: int) -> dict[str, StepTimer]:
    """A timer for each kind of weights."""
    auto, int8 = QuantizationSetting.AUTO, QuantizationSetting.INT8
    with tempfile.TemporaryDirectory(prefix="stepwell-int4-") as directory:
        int4_model = Path(directory) / "int4"
        write_int4_model(model, int4_model)
        kinds = {STORED: (model, auto), "int8": (model, int8), "int4": (int4_model, int8)}
        return {
            name: _build_timer(path, quantization, num_steps, num_threads)
            for name, (path, quantization) in kinds.items()
        }


def _build_timer(
    model: Path, quantization: QuantizationSetting, num_steps: int, num_threads: int
) -> StepTimer:
    most = max(load.num_requests * load.num_blocks(num_steps) for load in LOADS)
    settings = WorkerSettings(
        model=model,
        quantization=quantization,
        num_threads=num_threads,
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        max_num_seqs=max(load.num_requests for load in LOADS),
        max_num_batched_tokens=1024,
        num_blocks=1 + most,
    )
    return StepTimer(build_worker(settings, "benchmark", lambda: None).runner, num_steps)


def table(timers: Mapping[str, StepTimer], num_rounds: int) -> str:
    """Measures every load, after a round that does not count."""
    lines = ["| load | weights | ms | times as fast as stored |", "| --- | --- | ---: | ---: |"]
    for load in LOADS:
        turns = [
            {name: timer.turn(load) for name, timer in timers.items()}
            for _ in range(num_rounds + 1)
        ][1:]
        for name in timers:
            millis = statistics.median(times[name] for times in turns)
            ratio = statistics.median(times[STORED] / times[name] for times in turns)
            lines.append(f"| {load.name} | {name} | {millis:.2f} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
