"""Measures a worker on the CPU with weights of 8 and 4 bits, in alternating steps.

    python -m benchmarks.worker.quantization --model 1.1b [--rounds 9] [--llamacpp-python PATH]

Four model runners differ in their weights:

* as stored in the checkpoint;
* in 8 bits;
* in 8 bits, with the inputs of projections also in 8 bits (W8A8);
* in 4 bits, with one scale for each group of 128 inputs.

Quantized models have an output head of 8 bits. Each runner repeats the same steps: decodes of 1, 8
and 32 requests after prefixes of 128 tokens, and a prompt of 512 tokens. In each round each runner
computes a few steps, and the result is their median time. The speed-up is the ratio of the time
with stored weights to the time with quantized weights, as the median over rounds. On a machine with
other load, use --processor-time with one thread, which excludes the other programs' time.

If an interpreter with llama-cpp-python and gguf is given, llama.cpp alternates with the runners.
llama.cpp uses the same weights in bfloat16, in Q8_0, and in Q4_0 with embeddings and head in Q8_0.
It runs the loads of benchmarks.worker.loads: decodes of 64 tokens after prompts of 128 tokens, and
a prompt of 512 tokens.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.common.arguments import add_sized_model, counts, make_parser, program
from benchmarks.common.console import log, show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from benchmarks.common.quantized_model import write_int4_model
from benchmarks.worker.engine_process import EngineProcess
from benchmarks.worker.loads import (
    DECODE_LEVELS,
    DECODE_PROMPT,
    PREFILL,
    PREFILL_TOKENS,
    decode_name,
)
from benchmarks.worker.step_timer import StepsLoad, StepTimer, worker_for
from services.worker.models.quantization_config import QuantizationSetting

LOADS = tuple(
    StepsLoad(f"decode, {level} at once", level, DECODE_PROMPT) for level in DECODE_LEVELS
)
PROMPT = StepsLoad(f"prompt of {PREFILL_TOKENS} tokens", 1, 0, PREFILL_TOKENS)
STORED = "stored"
LLAMACPP_WEIGHTS = ("bf16", "q8_0", "q4_0")


class Timer(Protocol):
    def turn(self, load: StepsLoad) -> float:
        """Runs the load. Returns the milliseconds per step."""


class LlamaCppTimer:
    """Runs llama.cpp in a separate process."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._rounds = itertools.count()

    def turn(self, load: StepsLoad) -> float:
        """Runs the load. Returns the milliseconds per step.

        A decode step computes one token of each request. A prompt step computes the whole prompt.
        """
        is_decode = load.num_tokens == 1
        name = decode_name(load.num_requests) if is_decode else PREFILL
        tokens_per_second = self._process.measure(name, next(self._rounds))
        return 1000 * load.num_requests * load.num_tokens / tokens_per_second


def main() -> None:
    parser = make_parser("worker.quantization", __doc__)
    add_sized_model(parser)
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count processor time in place of wall time; with one thread",
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each kind of weights")
    parser.add_argument("--steps", type=int, default=16, help="steps of a turn")
    parser.add_argument(
        "--llamacpp-python",
        type=program,
        help="Python interpreter with llama-cpp-python and gguf",
    )
    parser.add_argument(
        "--concurrency",
        type=counts,
        default=DECODE_LEVELS,
        metavar="N,N",
        help="numbers of requests that decode at once: 1, 8 or 32 (default: all)",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.concurrency) - set(DECODE_LEVELS):
        parser.error(f"argument --concurrency: no load has {min(unknown)} requests")
    if arguments.steps < 2:
        parser.error("argument --steps: the first step of a decode is not timed, so at least 2")
    if arguments.processor_time and (arguments.threads > 1 or arguments.llamacpp_python):
        parser.error("argument --processor-time: needs --threads 1, and no --llamacpp-python")
    clock = time.process_time if arguments.processor_time else time.perf_counter
    torch.set_num_threads(arguments.threads)
    model = find_model(arguments.model)
    timers: dict[str, Timer] = {**build_timers(model, arguments.steps, arguments.threads, clock)}
    with ExitStack() as running:
        if arguments.llamacpp_python:
            timers |= start_llamacpp(running, arguments.llamacpp_python, model, arguments.threads)
        show(machine_text(machine(), "worker.quantization"))
        loads = [load for load in LOADS if load.num_requests in arguments.concurrency]
        show(table(timers, arguments.rounds, [*loads, PROMPT]))


def start_llamacpp(
    running: ExitStack, python: str, model: Path, num_threads: int
) -> dict[str, LlamaCppTimer]:
    """Starts llama.cpp with each kind of weights. Closing `running` ends the processes."""
    timers = dict[str, LlamaCppTimer]()
    for weights in LLAMACPP_WEIGHTS:
        flags = ("--weights", weights, "--least-seconds", "0")
        process = EngineProcess("llamacpp", python, model, num_threads, flags=flags)
        running.enter_context(process)
        version = process.wait_ready()
        timers[f"{version}, {weights}"] = LlamaCppTimer(process)
    return timers


def build_timers(
    model: Path,
    num_steps: int,
    num_threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, StepTimer]:
    """Maps each kind of weights to its timer. `clock` returns seconds."""
    with tempfile.TemporaryDirectory(prefix="stepwell-int4-") as directory:
        int4_model = Path(directory) / "int4"
        write_int4_model(model, int4_model)
        kinds = {
            STORED: (model, QuantizationSetting.AUTO),
            "int8": (model, QuantizationSetting.INT8),
            "w8a8": (model, QuantizationSetting.W8A8),
            "int4": (int4_model, QuantizationSetting.INT8),
        }
        return {
            name: _build_timer(path, quantization, num_steps, num_threads, clock)
            for name, (path, quantization) in kinds.items()
        }


def _build_timer(
    model: Path,
    quantization: QuantizationSetting,
    num_steps: int,
    num_threads: int,
    clock: Callable[[], float],
) -> StepTimer:
    settings = {"quantization": quantization, "num_threads": num_threads}
    return StepTimer(worker_for(model, LOADS, num_steps, **settings).runner, num_steps, clock)


def table(timers: Mapping[str, Timer], num_rounds: int, loads: Sequence[StepsLoad]) -> str:
    """Measures every load. The first round is a warm-up and is discarded."""
    lines = ["| load | weights | ms | times as fast as stored |", "| --- | --- | ---: | ---: |"]
    for load in loads:
        turns = list[dict[str, float]]()
        for number in range(num_rounds + 1):
            turns.append({name: timer.turn(load) for name, timer in timers.items()})
            log(f"{load.name}, round {number} of {num_rounds}")
        del turns[0]
        for name in timers:
            millis = statistics.median(times[name] for times in turns)
            ratio = statistics.median(times[STORED] / times[name] for times in turns)
            lines.append(f"| {load.name} | {name} | {millis:.2f} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
