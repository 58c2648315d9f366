"""Attention in C++ has the same bits for any division into steps, threads, batches and pages."""

import numpy as np
import pytest
import torch

from services.worker.backends.attention import AttentionLayer, AttentionShape, Rotation, StepLayout
from services.worker.backends.choices import KVCacheDtype
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.paged_attention import NativePagedAttention

LENGTH = 1100
"""The length of a sequence, whose keys the kernels compute in three parts."""

# Number of heads, number of key heads, head size, half of the rotated elements, window, softcap.
CASES = {
    "one query head of a key head": (2, 2, 48, 24, None, None),
    "three, fewer pairs than a head has": (9, 3, 64, 16, None, None),
    "many": (20, 1, 40, 20, None, 20.0),
    "a short window": (4, 2, 64, 32, 33, None),
    "a window longer than a part": (3, 1, 72, 36, 600, 3.0),
    "heads of 128": (8, 1, 128, 64, None, None),
    "heads of 10": (4, 2, 10, 5, 70, None),
}
WAYS = {
    "chunks of 33": [33] * 33,
    "in two, then token by token": [490, *[1] * 40, 460, *[1] * 60, 50],
    "chunks that begin anywhere": [1, 7, 16, 63, 1, 64, 65, 300, 2, 5, 511, 1, 1, 1, 62],
}


class Inputs:
    def __init__(
        self, case: str, dtype: torch.dtype, kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    ) -> None:
        heads, kv_heads, dim, half, window, softcap = CASES[case]
        torch.manual_seed(12)
        self.layer = AttentionLayer(heads, kv_heads, dim, dim**-0.5, window, softcap)
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        fused = 1.5 * torch.randn(LENGTH, heads + 2 * kv_heads, dim)
        self.heads = fused.to(dtype).tensor_split((heads, heads + kv_heads), dim=1)
        angles = torch.rand(LENGTH, half) * 6
        self.rotation = (angles.cos().to(dtype), angles.sin().to(dtype))

    def outputs(
        self, native, counts: list[int], *, threads: int, block_size: int = 16, beside: int = 0
    ) -> torch.Tensor:
        """The outputs of all tokens, computed in steps of `counts` tokens. `beside` other sequences
        compute the same numbers of tokens in these steps.
        """
        torch.set_num_threads(threads)
        pages = -(-LENGTH // block_size)
        num_blocks = 1 + (1 + beside) * pages
        shape = AttentionShape(
            (self.layer,), block_size, num_blocks, self.dtype, kv_cache_dtype=self.kv_cache_dtype
        )
        attention = NativePagedAttention(native.functions, LargePages(), shape)
        table = np.random.default_rng(beside).permutation(num_blocks - 1).astype(np.int32) + 1
        found, begin, sequences = [], 0, 1 + beside
        rest = LENGTH - sum(counts)
        for count in [*counts, rest] if rest else counts:
            end = begin + count
            layout = StepLayout(
                num_decodes=sequences if count == 1 else 0,
                query_starts=np.arange(0, sequences * count + 1, count, dtype=np.int32),
                seq_lens=np.full(sequences, end, np.int32),
                rows=np.arange(sequences, dtype=np.int32),
                tables=table.reshape(sequences, pages),
                block_size=block_size,
            )
            given = [part[begin:end].repeat(sequences, 1, 1) for part in self.heads]
            cos, sin = (part[begin:end].repeat(sequences, 1) for part in self.rotation)
            outputs = attention.begin_step([layout])(0, *given, Rotation(cos, sin))
            outputs = outputs.view(sequences, count, -1)
            assert all(torch.equal(outputs[0], other) for other in outputs)
            found.append(outputs[0])
            begin = end
        torch.set_num_threads(2)
        return torch.cat(found)


@pytest.mark.parametrize("kept", KVCacheDtype, ids=lambda kept: kept.value)
@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_how_a_prompt_is_chunked(
    native, case: str, kept: KVCacheDtype
) -> None:
    inputs = Inputs(case, native.dtype, kept)
    whole = inputs.outputs(native, [], threads=1)
    assert whole.isfinite().all()
    for (way, counts), threads in zip(WAYS.items(), (7, 2, 1), strict=True):
        assert torch.equal(inputs.outputs(native, counts, threads=threads), whole), way
    for threads in (2, 7):
        assert torch.equal(inputs.outputs(native, [], threads=threads), whole)
    beside = inputs.outputs(native, WAYS["in two, then token by token"], threads=2, beside=4)
    assert torch.equal(beside, whole)


@pytest.mark.parametrize("case", list(CASES)[:4])
@pytest.mark.parametrize("block_size", [1, 3, 32, 256])
@pytest.mark.parametrize("kept", KVCacheDtype, ids=lambda kept: kept.value)
def test_bits_do_not_depend_on_the_page_size(
    native, case: str, block_size: int, kept: KVCacheDtype
) -> None:
    inputs = Inputs(case, native.dtype, kept)
    whole = inputs.outputs(native, [], threads=1)
    for counts in ([], WAYS["in two, then token by token"]):
        others = inputs.outputs(native, counts, threads=2, block_size=block_size)
        assert torch.equal(others, whole)
