"""Measures how fast decode attention reads keys and values on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.gpu.timing import seconds
from services.worker.backends.attention import AttentionLayer, AttentionShape, StepLayout
from services.worker.backends.cuda.device import CudaDevice
from services.worker.backends.cuda.paged_attention import XformersPagedAttention
from services.worker.platforms.cuda import CudaPlatform

CACHE_BYTES = 512 * 2**20
"""The minimum bytes of keys and values in one measurement, more than a GPU's cache stores."""
BATCHES = (1, 16, 64, 256)
CONTEXT, BLOCK_SIZE = 4096, 64
LONGEST = 131072
"""A model's maximum length. Keys are split by this length, not by the context's."""
LAYER = AttentionLayer(32, 8, 128, 128**-0.5)


def run(_platform: CudaPlatform, copy: float) -> bool:
    """Prints how many bytes per second recorded decodes (CUDA graphs) read, by batch size. The
    maximum length is the context, and then LONGEST.
    """
    print(
        "\n| batch | context | longest | µs a layer | GB/s of keys and values | of copy bandwidth |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for batch in BATCHES:
        size = batch * CONTEXT * 2 * LAYER.num_kv_heads * LAYER.head_dim * 2
        num_layers = max(-(-CACHE_BYTES // size), 1)
        for longest in (CONTEXT, LONGEST):
            run = decodes(CudaDevice(), batch, num_layers, max_model_len=longest)
            took = seconds(run) / num_layers
            rate = size / took
            figures = f"{took * 1e6:.0f} | {rate / 1e9:.0f} | {rate / copy:.0%}"
            print(f"| {batch} | {CONTEXT} | {longest} | {figures} |", flush=True)
    return True


def decodes(
    device: CudaDevice,
    batch: int,
    num_layers: int,
    *,
    batch_invariant: bool = False,
    max_model_len: int = CONTEXT,
) -> Callable[[], torch.Tensor]:
    """A recorded decode of `batch` sequences through the attention of `num_layers` layers."""
    width = CONTEXT // BLOCK_SIZE
    shape = AttentionShape(
        (LAYER,) * num_layers, BLOCK_SIZE, batch * width + 1, torch.bfloat16, device.torch_device
    )
    attention = XformersPagedAttention(
        shape, device, max_model_len // BLOCK_SIZE, batch_invariant=batch_invariant
    )
    step = attention.decode_step(batch)
    blocks = 1 + np.random.default_rng(0).permutation(batch * width).astype(np.int32)
    tables = blocks.reshape(batch, width)
    step.set(
        [
            StepLayout(
                num_decodes=batch,
                query_starts=np.arange(batch + 1, dtype=np.int32),
                seq_lens=np.full(batch, CONTEXT, np.int32),
                rows=np.arange(batch, dtype=np.int32),
                tables=tables,
                block_size=BLOCK_SIZE,
            )
        ]
    )
    query, key, value = (
        torch.randn(batch, heads, LAYER.head_dim, device=device.torch_device).bfloat16()
        for heads in (LAYER.num_heads, LAYER.num_kv_heads, LAYER.num_kv_heads)
    )

    def every_layer() -> torch.Tensor:
        for index in range(num_layers):
            output = step(index, query, key, value, None)
        return output

    return device.record(every_layer)
