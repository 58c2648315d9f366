"""Times the sampling of a row of logits in NumPy and in compiled code, which alternate.

    python -m benchmarks.worker.sampling --rows 8 --threads 2 --rounds 9

One sampler of each kind samples for the same requests from the same logits. Logits are normally
distributed numbers, multiplied by a spread. With a spread of 1 many tokens have similar
probabilities. With a spread of 6 only a few tokens do. In each round each sampler runs several
steps, and the result is their median time. Figures are medians over rounds, in microseconds per
row. The ratio of the two samplers is also a median over rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.common.arguments import count, counts, make_parser
from benchmarks.common.console import show
from benchmarks.common.machine import machine, machine_text
from services.common.request.sampling import SamplingParams
from services.worker.backends.native.compiled import default_cache_directory, load_compiled
from services.worker.backends.native.row_sampler import NativeRowSampler
from services.worker.sampling.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "repetition penalty": SamplingParams(temperature=0.8, repetition_penalty=1.1),
}
SPREADS = (1, 6)


@dataclass(frozen=True, slots=True)
class Case:
    """A vocabulary size, a spread of the logits, and a kind of sampling (a key of KINDS)."""

    vocab_size: int
    spread: int
    kind: str


def main() -> None:
    parser = make_parser("worker.sampling", __doc__)
    parser.add_argument("--vocabularies", type=counts, default=(4096, 49_152, 128_256))
    parser.add_argument("--rows", type=count, default=8, help="rows of a step")
    parser.add_argument("--threads", type=count, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=count, default=9, help="turns of each sampler")
    parser.add_argument("--steps", type=count, default=8, help="steps of a turn")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native = NativeRowSampler(load_compiled(default_cache_directory(), lambda: None))
    cases = [
        Case(vocab_size, spread, kind)
        for vocab_size in arguments.vocabularies
        for kind in KINDS
        for spread in SPREADS
    ]
    show(machine_text(machine(), f"worker.sampling --rows {arguments.rows}"))
    show(table(cases, native, arguments.rows, arguments.rounds, arguments.steps))


def table(
    cases: Sequence[Case], native: NativeRowSampler, num_rows: int, num_rounds: int, num_steps: int
) -> str:
    """Measures every case. The first round is a warm-up and is discarded."""
    lines = [
        "| vocabulary | parameters | spread | NumPy, µs | compiled, µs | times as fast |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for case in cases:
        samplers = [
            with_requests(Sampler(num_rows, case.vocab_size, row_sampler=chosen), case, num_rows)
            for chosen in (None, native)
        ]
        generator = torch.Generator().manual_seed(case.vocab_size)
        logits = torch.randn(num_rows, case.vocab_size, generator=generator) * case.spread
        turns = [
            [turn(sampler, logits, num_steps) for sampler in samplers]
            for _ in range(num_rounds + 1)
        ][1:]
        in_numpy, compiled = (statistics.median(times) for times in zip(*turns, strict=True))
        ratio = statistics.median(pair[0] / pair[1] for pair in turns)
        lines.append(
            f"| {case.vocab_size:,} | {case.kind} | {case.spread} | {in_numpy:.1f} | "
            f"{compiled:.1f} | {ratio:.1f} |"
        )
    return "\n".join(lines)


def with_requests(sampler: Sampler, case: Case, num_rows: int) -> Sampler:
    """Adds a request to each row of the sampler, with a prompt of one token and no output."""
    for row in range(num_rows):
        params = replace(KINDS[case.kind], seed=row)
        sampler.add(row, params, np.zeros(1, np.int32), 1)
    return sampler


def turn(sampler: Sampler, logits: torch.Tensor, num_steps: int) -> float:
    """The median time of a step, in microseconds per row."""
    rows, took = np.arange(len(logits)), []
    for _ in range(num_steps):
        began = time.perf_counter()
        sampler.sample(logits, rows)
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took) / len(logits)


if __name__ == "__main__":
    main()
