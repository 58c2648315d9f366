"""NaN and infinities in a row, or in a request's pages, do not change bits of other rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.backends.attention import AttentionShape
from services.worker.backends.choices import KVCacheDtype
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.native.paged_attention import NativePagedAttention
from services.worker.backends.quantized import QuantizedWeight, Weight, quantize_int8
from tests.worker.unit.backends.test_native_paged import Case, Sequences

VALUES = [torch.nan, torch.inf, -torch.inf]
COLUMNS, DEPTH, GROUP = 70, 576, 96
STORED = ["plain", "int8", "int4", "fp8", "w8a8"]
CASES = [
    Case(9, 3, 64, 16, half=0),
    Case(20, 1, 32, 3, half=0, window=33),
    Case(4, 2, 40, 16, half=0, softcap=20.0),
]
STEPS = [[70, 100, 33], [1, 1, 1], [1, 30, 5], [40, 1, 1], [0, 64, 1]]
SPOILED = 1
"""The sequence whose queries, keys and values are NaN or infinite."""


def drawn_weight(stored: str, dtype: torch.dtype) -> Weight:
    if stored == "plain":
        return torch.randn(COLUMNS, DEPTH).to(dtype)
    if stored == "w8a8":
        weight = quantize_int8(torch.randn(COLUMNS, DEPTH), quantizes_inputs=True)
        return replace(weight, dtype=dtype)
    most = 8 if stored == "int4" else 127
    codes = torch.randint(-most, most, (COLUMNS, DEPTH), dtype=torch.int8)
    if stored == "fp8":
        codes = (codes.float() / 32).to(torch.float8_e4m3fn)
    scales = torch.rand(COLUMNS, DEPTH // GROUP)
    return QuantizedWeight(codes, scales, None, 4 if stored == "int4" else 8, dtype)


@pytest.mark.parametrize("num_rows", [2, 16, 33, 70])
@pytest.mark.parametrize("stored", STORED)
def test_a_row_of_a_projection(native, stored: str, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    weight = drawn_weight(stored, native.dtype)
    linear = NativeLinear(native.functions, LargePages(), weight, None)
    x = torch.randn(num_rows, DEPTH).to(native.dtype)
    expected = linear.full(x).view(torch.int32)
    for number, row in enumerate({0, num_rows // 2, num_rows - 1}):
        spoiled = x.clone()
        spoiled[row, number * 100 :] = VALUES[number % len(VALUES)]
        found = linear.full(spoiled)
        assert not found[row].isfinite().any()
        others = torch.arange(num_rows) != row
        assert torch.equal(found.view(torch.int32)[others], expected[others])


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kept", KVCacheDtype, ids=lambda kept: kept.value)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_request_of_attention(native, case: Case, kept: KVCacheDtype, value: float) -> None:
    expected = outputs(native, case, kept, None)
    assert expected.isfinite().all()
    found = outputs(native, case, kept, value)
    assert torch.equal(bits(found), bits(expected))


def bits(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.view(torch.int16 if outputs.dtype is torch.bfloat16 else torch.int32)


def outputs(native, case: Case, kept: KVCacheDtype, value: float | None) -> torch.Tensor:
    """The outputs of all tokens except the tokens in SPOILED. If `value` is not None, it replaces
    all numbers of SPOILED and the initial contents of all pages.
    """
    torch.manual_seed(4)
    sequences = Sequences([300] * len(STEPS[0]), case.block_size)
    shape = AttentionShape(
        (case.layer,), case.block_size, sequences.num_blocks, native.dtype, kv_cache_dtype=kept
    )
    attention = NativePagedAttention(native.functions, LargePages(), shape)
    if value is not None:
        attention.pages[0].fill_(value if kept is KVCacheDtype.AUTO else -1)
    found = []
    for counts in STEPS:
        layout = sequences.grow(counts)
        heads = torch.randn(
            layout.num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim
        )
        rows = np.repeat(layout.rows, np.diff(layout.query_starts))
        if value is not None:
            heads[rows == SPOILED] = value
        ends = (case.num_heads, case.num_heads + case.num_kv_heads)
        parts = heads.to(native.dtype).tensor_split(ends, dim=1)
        output = attention.begin_step([layout])(0, *parts, None)
        if value is not None:
            assert not output[rows == SPOILED].isfinite().any()
        found.append(output[rows != SPOILED])
    return torch.cat(found)
