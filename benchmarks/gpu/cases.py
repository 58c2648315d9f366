"""The shapes of models and KV caches with which attention is checked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from benchmarks.gpu.attention_check import Case

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2}


def cases() -> Iterator[Case]:
    """Cases with different page sizes, ratios of heads, head sizes, windows and data types."""
    for block_size in (16, 32, 64, 128, 256):
        yield Case(block_size, 32, 8, 128, dtype=torch.bfloat16)
    yield Case(64, 32, 8, 128, dtype=torch.float16)
    for heads, head_dim in product(((8, 8), (8, 1)), (64, 128)):
        yield Case(64, *heads, head_dim, dtype=torch.bfloat16)
    for head_dim in (256, 512):
        yield Case(64, 8, 4, head_dim, dtype=torch.bfloat16)
    for window in (7, 100, 512):
        yield Case(64, 32, 8, 128, window=window, dtype=torch.bfloat16)
    for capped in (None, 100):
        yield Case(64, 8, 4, 256, window=capped, dtype=torch.bfloat16, softcap=50.0)


def named(case: Case) -> str:
    name = str(case.dtype).removeprefix("torch.")
    heads = f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}"
    window = "" if case.window is None else f", window {case.window}"
    cap = "" if case.softcap is None else f", scores up to {case.softcap:.0f}"
    return f"{name}, pages of {case.block_size}, {heads}{window}{cap}"
