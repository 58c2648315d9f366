"""What a worker computes on the CPU, beside the machine's limits and others' engines.

    python -m benchmarks.worker [--model 15m|135m|1.1b] [--threads N] [--rounds N]
                                [--vllm-python PATH] [--json FILE]

Random weights in bfloat16, greedy, ends of text ignored, all requests at once: prefill of 512
tokens; decode at 1, 8 and 32 (prompts of 128 tokens, 64 tokens out, those after the first counted);
and 32 requests that share 384 of their 416 tokens, 32 tokens out of each, from the first prompt to
the last token. Medians of rounds. Ours is runner, scheduler and pool in one process. transformers
is measured always; vLLM where an interpreter that has it is named. The limits: a large
multiplication in bfloat16, and memory read as a stream, both measured first.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.random_model import SIZES, Shape, tensor_dims
from benchmarks.report import machine, machine_text, worker_table
from benchmarks.serving import find_model
from benchmarks.worker_loads import DECODE_LEVELS, PREFILL, decode_name, medians

ROOT = Path(__file__).parents[1]
_GEMM = (512, 1536, 3072)
_STREAM_BYTES = 2**29
_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do: operations a second in bfloat16, and bytes read a second."""

    flops: float
    bytes_per_second: float

    def figures(self, shape: Shape) -> dict[str, float]:
        """The most tokens a second that they allow a model, attention and caches left out.

        A step reads every weight once; a tied embedding is the head's.
        """
        sizes = {name: _product(dims) for name, dims in tensor_dims(shape)}
        embedding = sizes["model.embed_tokens.weight"]
        layers = sum(size for name, size in sizes.items() if ".layers." in name)
        step_bytes = 2 * (layers + embedding)

        def decode(level: int) -> float:
            computing = 2 * level * (layers + embedding) / self.flops
            return level / max(step_bytes / self.bytes_per_second, computing)

        found = {decode_name(level): decode(level) for level in DECODE_LEVELS}
        return {PREFILL: self.flops / (2 * layers)} | found


def main() -> None:
    """The command line."""
    arguments = _parse()
    found = machine()
    torch.set_num_threads(arguments.threads)
    limits = measure_limits()
    model, columns = find_model(arguments.model), {"limit": limits.figures(SIZES[arguments.model])}
    for name, python in _sides(arguments).items():
        print(f"measuring {name}", file=sys.stderr, flush=True)
        columns[name] = medians(_measure(name, python, model, arguments))
    print(machine_text(found, "python -m benchmarks.worker"))
    print(
        f"\n{arguments.model}, {arguments.threads} threads, medians of {arguments.rounds} rounds. "
        f"Measured limits: {limits.flops / 1e9:.0f} GFLOP/s in bfloat16, "
        f"{limits.bytes_per_second / 1e9:.1f} GB/s read.\n"
    )
    print(worker_table(columns))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": found, "figures": columns}, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.worker", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", choices=SIZES, default="135m", help="shape of the model")
    parser.add_argument("--threads", type=int, default=2, help="threads to compute with")
    parser.add_argument("--rounds", type=int, default=5, help="how often each load is measured")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM, for its column")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args()


def _sides(arguments: argparse.Namespace) -> dict[str, str]:
    sides = {"stepwell": sys.executable, "transformers": sys.executable}
    if arguments.vllm_python:
        sides["vllm"] = arguments.vllm_python
    return sides


def _measure(
    name: str, python: str, model: Path, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """One side in a process of its own, which may log before and after its answer."""
    command = [python, "-m", f"benchmarks.worker_{name}", "--model", str(model)]
    command += ["--threads", str(arguments.threads), "--rounds", str(arguments.rounds)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "gen")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(arguments.threads)}
    if name == "stepwell":
        environment["OMP_WAIT_POLICY"] = "passive"
    done = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    [answer] = [line for line in done.stdout.splitlines() if line.startswith("{")]
    figures: dict[str, list[float]] = json.loads(answer)
    return figures


def measure_limits() -> Limits:
    """The best of repeats, with the threads that torch is set to."""
    rows, depth, columns = _GEMM
    weight = torch.randn(columns, depth).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    x = torch.randn(rows, depth).bfloat16()
    multiply = torch.ops.mkldnn._linear_pointwise
    stream = torch.zeros(_STREAM_BYTES // 4)
    return Limits(
        2 * rows * depth * columns / _best(lambda: multiply(x, packed, None, "none", [], "")),
        _STREAM_BYTES / _best(stream.sum),
    )


def _best(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def _product(dims: tuple[int, ...]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size


if __name__ == "__main__":
    main()
