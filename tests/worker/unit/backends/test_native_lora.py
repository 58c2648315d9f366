"""The native kernels add several LoRA adapters, each with few rows, to a projection."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from services.worker.backends.device import CpuDevice
from services.worker.backends.lora import LoraFactors, LoraLayer, LoraRows, LoraShape
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.native.lora import NativeLora, NativeLoraStep
from services.worker.backends.quantized import Weight, quantize_int8

COLUMNS = (176, 48, 64)
"""The numbers of output columns of three factors, as for queries, keys and values."""
DEPTH = 90


def factors(rank: int, depth: int = DEPTH) -> tuple[LoraFactors, ...]:
    ends = list(accumulate(COLUMNS))
    return tuple(
        LoraFactors(torch.randn(rank, depth), torch.randn(columns, rank), end - columns)
        for columns, end in zip(COLUMNS, ends, strict=True)
    )


def stored(weight: torch.Tensor, form: str) -> Weight:
    """Converts the weight to the packed format `form`. Quantized formats round it."""
    if form == "plain":
        return weight
    quantized = quantize_int8(weight, quantizes_inputs=form == "w8a8")
    if form != "int4":
        return quantized
    codes = quantized.codes.div(16, rounding_mode="floor")
    return replace(quantized, codes=codes, scales=quantized.scales * 16, bits=4)


@pytest.mark.parametrize(
    "rows_of_each",
    [(2,) * 16, (1,) * 18, (1, 3, 2, 2, 5, 1, 1, 14, 2), (1, 1, 1), (4, 4, 4, 4, 3, 3, 3, 1)],
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
    adapters = packed(layers, shape, native)
    # The rows of an adapter are not consecutive. The last two rows have no adapter.
    order = np.random.default_rng(3).permutation(num_rows - 2).astype(np.int32)
    ends = list(accumulate(rows_of_each))
    parts = [np.sort(part) for part in np.split(order, ends[:-1])]

    together = assert_rows_are_those_alone(linear, x, adapters, parts)

    assert torch.equal(together[-2:], linear(x[-2:]))
    for layer, rows in zip(layers, parts, strict=True):
        exact = linear.full(x[rows]).double()
        for one in in_dtype(layer, native.dtype).qkv:
            added = x[rows].double() @ one.a.double().T @ one.b.double().T
            exact[:, one.first : one.first + len(one.b)] += added
        error = (together[rows].double() - exact).square().mean().sqrt()
        assert error < native.tolerance * exact.square().mean().sqrt()


@pytest.mark.parametrize(
    ("num_rows", "num_adapters", "depth"), [(9, 3, DEPTH), (16, 4, DEPTH), (70, 16, 4096)]
)
def test_adapters_of_rows_in_turn_add_what_each_adds_alone(
    native, num_rows: int, num_adapters: int, depth: int
) -> None:
    """The adapters are assigned to rows in rotation."""
    torch.manual_seed(5)
    shape = LoraShape(sum(COLUMNS), depth)
    weight = torch.randn(shape.columns, depth).to(native.dtype)
    linear = NativeLinear(native.functions, LargePages(), weight, None)
    layers = [LoraLayer(qkv=factors(16, depth)) for _ in range(num_adapters)]
    parts = [np.arange(first, num_rows, num_adapters) for first in range(num_adapters)]
    x = torch.randn(num_rows, depth).to(native.dtype)
    assert_rows_are_those_alone(linear, x, packed(layers, shape, native), parts)


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


def test_adapters_of_the_same_ranks_share_where_their_columns_begin(native) -> None:
    shape = LoraShape(sum(COLUMNS), DEPTH)
    layers = [LoraLayer(qkv=factors(rank)) for rank in (8, 8, 12)]
    adapters = packed(layers, shape, native)
    first, second, other = (adapter.layers[0].parts[0].begins for adapter in adapters)
    assert first == second != other


def packed(layers: list[LoraLayer], shape: LoraShape, native) -> list[NativeLora]:
    return [
        NativeLora([in_dtype(layer, native.dtype)], {"qkv": shape}, native.functions.panel_width)
        for layer in layers
    ]


def assert_rows_are_those_alone(
    linear: NativeLinear, x: torch.Tensor, adapters: list[NativeLora], parts: list[np.ndarray]
) -> torch.Tensor:
    """Asserts that a row has the same result alone and with other rows. First projects all rows in
    one step, `parts[i]` with adapter i, and returns these results. Then projects each row in a step
    of its own.
    """
    together = projected(linear, x, adapters, parts)
    for adapter, rows in zip(adapters, parts, strict=True):
        for row in rows:
            alone = projected(linear, x[row : row + 1], [adapter], [np.zeros(1)])
            assert torch.equal(together[row : row + 1], alone)
    return together


def projected(
    linear: NativeLinear, x: torch.Tensor, adapters: list[NativeLora], parts: list[np.ndarray]
) -> torch.Tensor:
    starts = np.array([0, *accumulate(len(rows) for rows in parts)], np.int32)
    order = np.concatenate(parts).astype(np.int32)
    step = NativeLoraStep(LoraRows(tuple(adapters), order, starts, len(x), CpuDevice()))
    return linear(x, step.layer(0).qkv)


def in_dtype(layer: LoraLayer, dtype: torch.dtype) -> LoraLayer:
    return LoraLayer(
        qkv=tuple(LoraFactors(one.a.to(dtype), one.b.to(dtype), one.first) for one in layer.qkv)
    )
