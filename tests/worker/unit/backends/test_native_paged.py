"""Attention in C++ and attention in torch have equal results in the same steps."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from services.worker.backends.attention import (
    AttentionLayer,
    AttentionShape,
    PagedAttention,
    Rotation,
    StepLayout,
)
from services.worker.backends.choices import KVCacheDtype
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.paged_attention import NativePagedAttention
from services.worker.backends.torch.paged_attention import TorchPagedAttention


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    half: int
    window: int | None = None
    softcap: float | None = None

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.window,
            self.softcap,
        )


CASES = [
    Case(9, 3, 64, 16, half=32),
    Case(4, 4, 16, 1, half=8),
    Case(6, 1, 128, 32, half=64),
    Case(8, 2, 256, 4, half=64, window=7),
    Case(6, 2, 24, 256, half=12, window=100, softcap=3.0),
    Case(4, 2, 40, 16, half=0, softcap=20.0),
    Case(5, 5, 80, 3, half=40),
    Case(3, 1, 72, 16, half=36, window=33),
    Case(16, 1, 96, 8, half=48),
    Case(2, 2, 10, 4, half=5),
]


class Sequences:
    def __init__(self, longest: list[int], block_size: int) -> None:
        counts = [-(-length // block_size) for length in longest]
        self.num_blocks = 1 + sum(counts)
        blocks = np.random.default_rng(0).permutation(self.num_blocks - 1) + 1
        self._tables = np.zeros((len(longest), max(counts)), np.int32)
        for row, of_row in enumerate(np.split(blocks, np.cumsum(counts)[:-1])):
            self._tables[row, : len(of_row)] = of_row
        self._block_size = block_size
        self._lengths = [0] * len(longest)

    def grow(self, counts: list[int]) -> StepLayout:
        """Appends `counts[i]` tokens, possibly 0, to sequence i. Returns the layout of the step."""
        grown = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        rows = [row for row, count in enumerate(counts) if count]
        rows.sort(key=lambda row: (counts[row] != 1, grown[row] if counts[row] == 1 else 0))
        self._lengths = grown
        taken = [counts[row] for row in rows]
        return StepLayout(
            num_decodes=taken.count(1),
            query_starts=np.cumsum([0, *taken]).astype(np.int32),
            seq_lens=np.array([grown[row] for row in rows], np.int32),
            rows=np.array(rows, np.int32),
            tables=self._tables,
            block_size=self._block_size,
        )


def assert_equal_step(
    native, case: Case, layout: StepLayout, attentions: list[PagedAttention]
) -> None:
    """Asserts that C++ equals torch, for slices of a fused projection with padding."""
    total, heads, kv_heads = layout.num_tokens, case.num_heads, case.num_kv_heads
    fused = torch.randn(total + 2, heads + 2 * kv_heads, case.head_dim).to(native.dtype)
    query, key, value = fused.tensor_split((heads, heads + kv_heads), dim=1)
    rotation = None
    if case.half:
        angles = torch.rand(total + 2, case.half) * 6
        rotation = Rotation(angles.cos().to(native.dtype), angles.sin().to(native.dtype))
    actual, expected = (
        attention.begin_step([layout])(0, query, key, value, rotation) for attention in attentions
    )
    assert actual.shape == (total + 2, heads * case.head_dim)
    assert not actual[total:].any()
    torch.testing.assert_close(
        actual[:total], expected[:total], atol=2 * native.tolerance, rtol=native.tolerance
    )


def both(native, case: Case, num_blocks: int) -> list[PagedAttention]:
    shape = AttentionShape((case.layer,), case.block_size, num_blocks, native.dtype)
    return [NativePagedAttention(native.functions, LargePages(), shape), TorchPagedAttention(shape)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prompts_decodes_and_chunks_equal_torchs_attention(native, case: Case) -> None:
    torch.manual_seed(6)
    lengths = [1, 3, 30, 64, 65, 150, 40, 1]
    sequences = Sequences([length + 110 for length in lengths], case.block_size)
    attentions = both(native, case, sequences.num_blocks)
    for counts in (lengths, [1] * 8, [1, 5, 1, 101, 1, 5, 0, 2], [1, 1, 0, 1, 0, 1, 1, 1]):
        assert_equal_step(native, case, sequences.grow(counts), attentions)


def test_heads_of_odd_size_equal_torchs_attention(native) -> None:
    torch.manual_seed(9)
    case = Case(4, 2, 15, 16, half=0)
    sequences = Sequences([40, 70], case.block_size)
    shape = AttentionShape((case.layer,), case.block_size, sequences.num_blocks, native.dtype)
    attentions = [native.kernels.paged_attention(shape), TorchPagedAttention(shape)]
    for counts in ([30, 65], [1, 1], [1, 3]):
        assert_equal_step(native, case, sequences.grow(counts), attentions)


@pytest.mark.parametrize("case", CASES[:6], ids=str)
def test_a_lone_long_context_is_cut_and_joined(native, case: Case) -> None:
    torch.manual_seed(7)
    sequences = Sequences([2000], case.block_size)
    attentions = both(native, case, sequences.num_blocks)
    for count in (1700, 1, 1, 7):
        assert_equal_step(native, case, sequences.grow([count]), attentions)


def test_scores_far_from_zero_are_capped_on_either_side(native) -> None:
    case = Case(2, 2, 32, 16, half=0, softcap=1.0)
    layout = Sequences([20], 16).grow([20])
    query = torch.full((20, 2, 32), 30.0, dtype=native.dtype)
    key = query.clone()
    key[::3] *= -1
    value = torch.randn(20, 2, 32).to(native.dtype)
    actual, expected = (
        attention.begin_step([layout])(0, query, key, value, None)
        for attention in both(native, case, 3)
    )
    torch.testing.assert_close(actual, expected, atol=native.tolerance, rtol=native.tolerance)


@pytest.mark.parametrize("kept", KVCacheDtype, ids=lambda kept: kept.value)
def test_stale_values_in_a_block_do_not_change_results(native, kept: KVCacheDtype) -> None:
    torch.manual_seed(8)
    case = Case(4, 2, 32, 16, half=16)
    shape = AttentionShape((case.layer,), 16, 12, native.dtype, kv_cache_dtype=kept)
    attention = NativePagedAttention(native.functions, LargePages(), shape)
    broken = torch.full((176, 2, 32), torch.nan).to(native.dtype)
    query = torch.randn(176, 4, 32).to(native.dtype)
    attention.begin_step([Sequences([176], 16).grow([176])])(0, query, broken, broken, None)
    if kept is not KVCacheDtype.AUTO:  # recurrent states leave any bytes
        attention.pages[0].fill_(-1)
    for count in (37, 1, 1):
        layout = Sequences([50, 60], 16).grow([count, count])
        heads = torch.randn(2 * count, 8, 32).to(native.dtype)
        query, key, value = heads.tensor_split((4, 6), dim=1)
        assert attention.begin_step([layout])(0, query, key, value, None).isfinite().all()


@pytest.mark.parametrize("kept", KVCacheDtype, ids=lambda kept: kept.value)
def test_cleared_blocks_hold_zeros(native, kept: KVCacheDtype) -> None:
    case = Case(2, 2, 32, 16, half=0)
    shape = AttentionShape((case.layer,), 16, 4, native.dtype, kv_cache_dtype=kept)
    attention = NativePagedAttention(native.functions, LargePages(), shape)
    sequences = Sequences([32], 16)
    heads = torch.randn(16, 6, 32).to(native.dtype)
    layout = sequences.grow([16])
    attention.begin_step([layout])(0, *heads.tensor_split((2, 4), dim=1), None)
    attention.zero_blocks(layout.block_tables[0, :1])
    query, value = torch.randn(2, 1, 2, 32).to(native.dtype)
    output = attention.begin_step([sequences.grow([1])])(
        0, query, torch.zeros_like(value), value, None
    )
    tolerance = native.tolerance if kept is KVCacheDtype.AUTO else max(native.tolerance, 1e-3)
    torch.testing.assert_close(output, value.flatten(1) / 17, atol=tolerance, rtol=tolerance)
