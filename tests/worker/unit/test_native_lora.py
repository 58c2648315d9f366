"""What adapters of few rows each add to a projection in the compiled library, many at once."""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from services.worker.backends.lora import LoraFactors, LoraLayer, LoraRows, LoraShape
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.native.lora import NativeLora, NativeLoraStep
from services.worker.backends.quantized import Weight, quantize_int8

COLUMNS = (48, 16, 32)
"""Of the output, those of three factors, as of queries, keys and values."""
DEPTH = 90
CPU = torch.device("cpu")


def factors(rank: int) -> tuple[LoraFactors, ...]:
    ends = list(accumulate(COLUMNS))
    return tuple(
        LoraFactors(torch.randn(rank, DEPTH), torch.randn(columns, rank), end - columns)
        for columns, end in zip(COLUMNS, ends, strict=True)
    )


def stored(weight: torch.Tensor, form: str) -> Weight:
    """The weight in a format of packed ones, or one that differs from it by rounding."""
    if form == "plain":
        return weight
    quantized = quantize_int8(weight, quantizes_inputs=form == "w8a8")
    if form != "int4":
        return quantized
    codes = quantized.codes.div(16, rounding_mode="floor")
    return replace(quantized, codes=codes, scales=quantized.scales * 16, bits=4)


@pytest.mark.parametrize(
    "rows_of_each",
    [(2,) * 16, (1, 3, 2, 2, 5, 1, 1, 14, 2), (1, 1, 1), (4, 4, 4, 4, 3, 3, 3, 1)],
)
@pytest.mark.parametrize("form", ["plain", "int8", "int4", "w8a8"])
def test_adapters_of_few_rows_add_what_each_adds_alone(
    native, rows_of_each: tuple[int, ...], form: str
) -> None:
    torch.manual_seed(3)
    num_rows = sum(rows_of_each) + 2
    shape = LoraShape(sum(COLUMNS), DEPTH)
    weight = torch.randn(shape.columns, DEPTH).to(native.dtype)
    linear = NativeLinear(native.functions, LargePages(), stored(weight, form), None)
    x = torch.randn(num_rows, DEPTH).to(native.dtype)
    layers = [LoraLayer(qkv=factors(4 + number % 3)) for number in range(len(rows_of_each))]
    adapters = [
        NativeLora([in_dtype(layer, native.dtype)], {"qkv": shape}, native.functions.panel_width)
        for layer in layers
    ]
    # Rows of an adapter lie apart from each other; the last two have none.
    order = np.random.default_rng(3).permutation(num_rows - 2).astype(np.int32)
    starts = np.array([0, *accumulate(rows_of_each)], np.int32)
    parts = [np.sort(order[first:end]) for first, end in pairwise(starts)]

    step = NativeLoraStep(LoraRows(tuple(adapters), np.concatenate(parts), starts, num_rows, CPU))
    together = linear(x, step.layer(0).qkv)

    assert torch.equal(together[-2:], linear(x[-2:]))
    for adapter, layer, rows in zip(adapters, layers, parts, strict=True):
        for row in rows:
            one = LoraRows((adapter,), np.zeros(1, np.int32), np.array([0, 1], np.int32), 1, CPU)
            alone = linear(x[row : row + 1], NativeLoraStep(one).layer(0).qkv)
            assert torch.equal(together[row : row + 1], alone)
        exact = linear.full(x[rows]).double()
        for one in in_dtype(layer, native.dtype).qkv:
            added = x[rows].double() @ one.a.double().T @ one.b.double().T
            exact[:, one.first : one.first + len(one.b)] += added
        error = (together[rows].double() - exact).square().mean().sqrt()
        assert error < native.tolerance * exact.square().mean().sqrt()


def test_large_adapters_begin_at_different_places_in_their_pages(native) -> None:
    shape = LoraShape(512, 4096)
    layer = LoraLayer(qkv=(LoraFactors(torch.randn(512, 4096), torch.randn(512, 512), 0),))
    adapters = [
        NativeLora(
            [in_dtype(layer, native.dtype)] * 2, {"qkv": shape}, native.functions.panel_width
        )
        for _ in range(3)
    ]
    assert adapters[0].num_bytes >= 8 * 2**20
    begins = {adapter.layers[0].parts[0].a % (2 * 2**20) for adapter in adapters}
    assert len(begins) == 3


def in_dtype(layer: LoraLayer, dtype: torch.dtype) -> LoraLayer:
    return LoraLayer(
        qkv=tuple(LoraFactors(one.a.to(dtype), one.b.to(dtype), one.first) for one in layer.qkv)
    )
