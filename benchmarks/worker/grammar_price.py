"""Measures by how much requests with a schema lengthen the worker's steps on the CPU.

    python -m benchmarks.worker.grammar_price --model models/demo --rows 8,32 --rounds 9

One model runner decodes requests at temperature 1. Two kinds of turns (repetitions of the steps)
alternate. In the first kind, half of the requests are constrained to the schema of
`benchmarks.serving --structured`, and in the second none. Times are processor time of the only
compute thread. A turn's time is the median of its steps. The price of a row is the difference
between the two turns, divided by the number of constrained rows, as the median over rounds.

Then the outputs are passed to llguidance's matchers alone, which compute the same masks. This
measures llguidance's part of the price, once with warm and once with cold processor caches. For
cold caches, 64 MiB are read before each step. The read evicts code and matchers from the caches, as
a model's step and other processes do.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.arguments import add_sized_model, count, counts, make_parser
from benchmarks.common.console import show
from benchmarks.common.machine import machine, machine_text
from benchmarks.common.models import find_model
from benchmarks.serving.structured_neighbors import CONSTRAINED
from benchmarks.worker.step_timer import BLOCK_SIZE, StepsLoad, StepTimer
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.worker.build import build_worker
from services.worker.core.worker import Worker
from services.worker.sampling.grammar import Grammars
from services.worker.settings import WorkerSettings

FORM = StructuredOutputs(
    StructuredOutputsKind.JSON, json.dumps(CONSTRAINED["structured_outputs"]["json"])
)
NUM_PREFIX = 128
_READ_BYTES = 2**26
"""Number of bytes that are read to clear a core's caches. The caches are smaller."""


@dataclass(frozen=True, slots=True)
class MatcherMicros:
    """Mean microseconds that matchers take per token, and the fraction of tokens that are forced. A
    token is forced if the grammar allows no other token.
    """

    advance: float
    mask: float
    mask_of_forced: float
    share_forced: float


def main() -> None:
    parser = make_parser("worker.grammar_price", __doc__)
    add_sized_model(parser, "models/demo")
    parser.add_argument("--rows", type=counts, default=(8, 32), help="requests at once")
    parser.add_argument("--rounds", type=count, default=9, help="turns with and without")
    parser.add_argument("--steps", type=count, default=100, help="steps of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    worker = build(find_model(arguments.model), max(arguments.rows), arguments.steps)
    show(machine_text(machine(), "worker.grammar_price"))
    show(table(worker, arguments.rows, arguments.rounds, arguments.steps))


def table(worker: Worker, numbers: Sequence[int], num_rounds: int, num_steps: int) -> str:
    """Measures each number of rows. The first round is a warm-up and is discarded."""
    if worker.grammars is None:
        raise ValueError("the model samples no tokens")
    lines = [
        "| rows | step without, µs | with, µs | price of a constrained row, µs "
        "| llguidance's of it, warm: advance + mask, µs | both, cold, µs "
        "| mask of a forced token, µs | forced tokens |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    timer = StepTimer(worker.runner, num_steps, time.thread_time)
    for number in numbers:
        load = StepsLoad("decode", number, NUM_PREFIX)
        turns, outputs = [], list[list[list[int]]]()
        for seed in range(num_rounds + 1):
            without, held = (
                timer.turn(load, sampling=sampling(number, seed, is_held=is_held))
                for is_held in (False, True)
            )
            turns.append((1000 * without, 1000 * held))
            held_tokens = (step[1::2] for step in timer.token_ids)
            outputs.append([list(output) for output in zip(*held_tokens, strict=True)])
        price = statistics.median(held - without for without, held in turns[1:])
        without, held = (statistics.median(times) for times in zip(*turns[1:], strict=True))
        alone = matcher_micros(worker.grammars, [output for turn in outputs for output in turn])
        cold = cold_micros(worker.grammars, outputs[-1])
        lines.append(
            f"| {number} | {without:.0f} | {held:.0f} | {price / (number // 2):.1f} | "
            f"{alone.advance:.1f} + {alone.mask:.1f} | {cold:.1f} | "
            f"{alone.mask_of_forced:.1f} | {alone.share_forced:.0%} |"
        )
    return "\n".join(lines)


def sampling(num_rows: int, seed: int, *, is_held: bool) -> list[SamplingParams]:
    """The sampling parameters of each row. If `is_held`, every second row is constrained."""
    free = [SamplingParams(temperature=1.0, seed=seed * num_rows + row) for row in range(num_rows)]
    return [
        replace(params, structured_outputs=FORM) if is_held and row % 2 else params
        for row, params in enumerate(free)
    ]


def matcher_micros(grammars: Grammars, outputs: Sequence[Sequence[int]]) -> MatcherMicros:
    """Times matchers on the tokens of `outputs`, which the schema allows."""
    advance, masks, of_forced = list[int](), list[int](), list[int]()
    for output in outputs:
        matcher = grammars.matcher(FORM)
        matcher.compute_bitmask()
        for token_id in output:
            began = time.thread_time_ns()
            matcher.consume_token(token_id)
            advanced = time.thread_time_ns()
            matcher.compute_bitmask()
            masks.append(time.thread_time_ns() - advanced)
            advance.append(advanced - began)
            if matcher.compute_ff_tokens():
                of_forced.append(masks[-1])
    return MatcherMicros(
        statistics.fmean(advance) / 1000,
        statistics.fmean(masks) / 1000,
        statistics.fmean(of_forced or [0]) / 1000,
        len(of_forced) / len(masks),
    )


def cold_micros(grammars: Grammars, outputs: Sequence[Sequence[int]]) -> float:
    """The mean microseconds of matchers per token with cold caches, for `outputs` that the schema
    allows. All outputs get one token in each step.
    """
    matchers = [grammars.matcher(FORM) for _ in outputs]
    for matcher in matchers:
        matcher.compute_bitmask()
    others = np.ones(_READ_BYTES, np.uint8)
    nanos = 0
    for tokens in zip(*outputs, strict=True):
        others.max()
        began = time.thread_time_ns()
        for matcher, token_id in zip(matchers, tokens, strict=True):
            matcher.consume_token(token_id)
            matcher.compute_bitmask()
        nanos += time.thread_time_ns() - began
    return nanos / 1000 / sum(map(len, outputs))


def build(model: Path, most_rows: int, num_steps: int) -> Worker:
    """A worker whose batch has `most_rows` rows."""
    num_blocks = most_rows * StepsLoad("decode", most_rows, NUM_PREFIX).num_blocks(num_steps)
    settings = WorkerSettings(
        model=model,
        num_threads=1,
        block_size=BLOCK_SIZE,
        max_num_seqs=most_rows,
        num_blocks=1 + num_blocks,
    )
    return build_worker(settings, "benchmark", lambda: None)


if __name__ == "__main__":
    main()
