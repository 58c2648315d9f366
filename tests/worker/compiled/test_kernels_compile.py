"""All kernels of a step compile to machine code for Ampere and Hopper GPUs, which is not run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from services.worker.backends.attention import AttentionLayer, AttentionShape, StepLayout
from services.worker.backends.cuda.paged_attention import XformersPagedAttention
from services.worker.backends.device import CpuDevice
from tests.worker.interpreted.interpreted_ops import AnywhereSplitK

MAX_MODEL_LEN = 1024
SHARED_BYTES = {(8, 0): 163 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}
"""The shared memory of a thread block in bytes, by compute capability."""


class Multiprocessors(CpuDevice):
    num_processors = 132


class AbsentGpu:
    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


@contextmanager
def compiling_only(capability: tuple[int, int]) -> Iterator[list[tuple[str, Any]]]:
    """In this context kernels are compiled but not run. The yielded list collects them."""
    compiled: list[tuple[str, Any]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG001
        kernel = launch(self, *args, warmup=True, **options)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(JITFunction, "run", compile_only)
        driver.set_active(AbsentGpu(capability))
        yield compiled


def mixed_step(layer: AttentionLayer, block_size: int) -> None:
    """Runs a step with two decodes, a chunk after many tokens, and a chunk at a prompt's start."""
    counts, lengths = [1, 1, 17, 3], [20, 300, 400, 3]
    width = MAX_MODEL_LEN // block_size
    shape = AttentionShape((layer,), block_size, 4 * width + 1, torch.bfloat16)
    attention = XformersPagedAttention(shape, Multiprocessors(), width, AnywhereSplitK)
    layout = StepLayout(
        num_decodes=2,
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array(lengths, np.int32),
        rows=np.arange(4, dtype=np.int32),
        tables=np.arange(1, 4 * width + 1, dtype=np.int32).reshape(4, width),
        block_size=block_size,
    )
    query, key, value = (
        torch.zeros(sum(counts), heads, layer.head_dim, dtype=torch.bfloat16)
        for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    )
    attention.begin_step([layout])(0, query, key, value, None)


@pytest.mark.parametrize(
    ("capability", "heads", "head_dim", "block_size", "window"),
    [
        ((9, 0), (32, 8), 128, 64, None),
        ((9, 0), (32, 8), 128, 64, 100),
        ((9, 0), (8, 8), 64, 16, 7),
        ((8, 0), (8, 1), 128, 256, None),
        ((8, 9), (8, 4), 512, 64, None),
    ],
)
def test_the_kernels_of_a_mixed_step_compile(
    capability: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    layer = AttentionLayer(*heads, head_dim, head_dim**-0.5, window)
    with compiling_only(capability) as compiled:
        mixed_step(layer, block_size)
    assert {name for name, _ in compiled} == {"_fwd_kernel_splitK", "_splitK_reduce"}
    assert len(compiled) >= (4 if window is None else 5)
    assert all(kernel.asm["cubin"] for _, kernel in compiled)
    assert max(kernel.metadata.shared for _, kernel in compiled) <= SHARED_BYTES[capability]
