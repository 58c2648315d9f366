"""Checks that a worker computes correctly on a GPU, and compares its speed with the memory's speed.

    python -u -m benchmarks.gpu                        # all parts, about ten minutes
    python -u -m benchmarks.gpu correctness attention  # some parts, about five minutes
    python -u -m benchmarks.gpu model                  # about five minutes, 75 GB of GPU memory

* correctness: compares the attention of mixed batches and of recorded decodes with plain attention,
  and grouped experts and sampling with the host's results.
* attention: measures how many bytes of keys and values decodes read per second, compared with a
  plain copy.
* invariance: checks that rows computed with --batch-invariant have the same bits in every batch. It
  also measures the cost of this mode: matrix products are compared with cuBLAS's products, and
  decode attention is compared with attention over split keys.
* model: runs a random model of 8 billion parameters with Llama 3.1's shape in bfloat16. It compares
  log-probabilities and tokens per second with transformers and its continuous batching. It also
  measures the bytes that a decode step reads.

The program needs torch, numpy, xFormers and Triton (`stepwell[gpu]`), and transformers for the last
part. It needs no other package, no code generated from the protos (`gen/`), and no running service.
If a case raises an error, its row shows the error, and the next case runs. The exit status is 1 if
a case is wrong or failed, or if there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib import import_module

import torch

from benchmarks.gpu.outcome import attempt
from benchmarks.gpu.timing import copy_bandwidth
from services.worker.backends.device import UnsuitableDevice
from services.worker.platforms.cuda import CudaPlatform
from services.worker.platforms.cuda_setup import find_setup

PARTS = ("correctness", "attention", "invariance", "model")


def main(argv: Sequence[str]) -> int:
    """Runs the parts that the command line names, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Check and measure a worker on a GPU."
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    chosen = parser.parse_args(argv).parts or PARTS
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}")
    if not torch.cuda.is_available():
        print("There is no GPU here, so nothing was run.", file=sys.stderr)
        return 1
    try:
        platform = CudaPlatform()
    except UnsuitableDevice as error:
        print(error.message, file=sys.stderr)
        return 1
    setup = find_setup()
    print(f"{setup.device_name}, torch {torch.__version__}, Triton {setup.triton}, ", end="")
    print(f"xFormers {setup.xformers}, {platform.device.num_processors} multiprocessors")
    copy = copy_bandwidth()
    print(f"copy bandwidth: {copy / 1e9:.0f} GB/s, read and written together")
    results = [_run(name, platform, copy) for name in chosen]
    return 0 if all(results) else 1


def _run(name: str, platform: CudaPlatform, copy: float) -> bool:
    """Imports and runs a part, and prints its duration. Only here are parts imported, because each
    needs other packages.
    """
    begun = time.monotonic()
    good = attempt(lambda: import_module(f"benchmarks.gpu.{name}").run(platform, copy), f"\n{name}")
    print(f"\n{name} took {time.monotonic() - begun:.0f} s", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
