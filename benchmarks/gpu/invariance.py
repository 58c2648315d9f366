"""Checks on a GPU that with --batch-invariant rows do not depend on the batch, and its cost."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.attention import BATCHES, decodes
from benchmarks.gpu.cases import cases, named
from benchmarks.gpu.invariance_check import ROWS, InvarianceCheck, products_differ
from benchmarks.gpu.outcome import attempt, verdict
from benchmarks.gpu.timing import seconds
from services.worker.backends.cuda.device import CudaDevice
from services.worker.backends.cuda.fixed_tiles import FixedTilesLinear
from services.worker.platforms.cuda import CudaPlatform

PRODUCTS = ((4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256))
"""Pairs (inputs, outputs) of the matrix products of a Llama model with 8 billion parameters."""


def run(platform: CudaPlatform, _copy: float) -> bool:
    """Checks matrix products and attention. Returns whether no row depends on its batch. Prints the
    rows that do, and the cost of --batch-invariant.
    """
    return all(
        [
            attempt(lambda: invariant_products(platform.device), "| products"),
            attempt(lambda: invariant_attention(platform.device), "| attention"),
            attempt(invariance_price, "| price of attention"),
        ]
    )


def invariant_products(device: CudaDevice) -> bool:
    """Checks and times products with the weight shapes of a Llama model of 8B parameters."""
    print("\n| product | rows | µs | cuBLAS µs | price |\n| --- | ---: | ---: | ---: | ---: |")
    right = True
    for width, out in PRODUCTS:
        differing = products_differ(device, torch.bfloat16, width, out)
        right &= not differing
        weight = torch.randn(out, width, device=device.torch_device).bfloat16()
        linear = FixedTilesLinear(weight)
        for count in ROWS:
            rows = torch.randn(count, width, device=device.torch_device).bfloat16()
            ours = seconds(partial(linear, rows))
            theirs = seconds(partial(torch.nn.functional.linear, rows, weight))
            figures = f"{ours * 1e6:.0f} | {theirs * 1e6:.0f} | {ours / theirs:.2f}"
            print(f"| {width} x {out} | {count} | {figures} |", flush=True)
        print(f"| {width} x {out} | differing: {differing} | | | {verdict(not differing)} |")
    return right


def invariant_attention(device: CudaDevice) -> bool:
    """Checks the attention of prompts that are computed whole, in chunks and token by token.

    Batches contain several prompts.
    """
    print("\n| attention | tokens that differ | |\n| --- | --- | --- |")
    right = True
    for case in cases():
        if case.softcap is not None:
            continue
        check = InvarianceCheck(case, device, [1, 37, 300, 1900])
        cuts = [
            [(1, 0, 20), (2, 0, 7), (3, 0, 1000)],
            [(1, 20, 21), (2, 7, 8), (3, 1000, 1001)],
            [(0, 0, 1), (1, 21, 37), (2, 8, 299), (3, 1001, 1899)],
            [(2, 299, 300), (3, 1899, 1900)],
        ]
        differing = check.differing(cuts)
        right &= not differing
        print(f"| {named(case)} | {differing} | {verdict(not differing)} |", flush=True)
    return right


def invariance_price() -> bool:
    """Times decode attention with and without --batch-invariant."""
    print(
        "\n| batch | µs a layer | with --batch-invariant | price |\n| ---: | ---: | ---: | ---: |"
    )
    for batch in BATCHES:
        plain, invariant = (
            seconds(decodes(CudaDevice(), batch, 1, batch_invariant=mode)) for mode in (False, True)
        )
        figures = f"{plain * 1e6:.0f} | {invariant * 1e6:.0f} | {invariant / plain:.2f}"
        print(f"| {batch} | {figures} |", flush=True)
    return True
