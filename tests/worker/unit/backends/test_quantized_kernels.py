"""Products of quantized weights equal products of the dequantized weights in double precision."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.backends.choices import Activation
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.quantized import QuantizedWeight, quantize_int8, stacked
from services.worker.backends.torch.kernels import TorchKernels

ROWS = (1, 2, 3, 4, 5, 12, 13, 18, 40)
_SHAPES = st.tuples(
    st.integers(1, 70),  # rows of the weight
    st.integers(1, 4),  # groups
    st.integers(1, 80),  # columns of a group
)


FLOAT8 = 0
"""As a number of bits, 0 stands for codes that are 8-bit floats."""


def drawn(
    rows: int, groups: int, group: int, bits: int, dtype: torch.dtype, *, offsets: bool
) -> QuantizedWeight:
    """A random weight with all possible codes, and scales and offsets of several magnitudes."""
    most = 2 ** ((bits or 8) - 1)
    codes = torch.randint(-most, most, (rows, groups * group), dtype=torch.int8)
    if bits == FLOAT8:
        codes[codes & 127 == 127] = 0  # NaN
        codes, bits = codes.view(torch.float8_e4m3fn), 8
    scales = torch.rand(rows, groups) * 10.0 ** torch.randint(-3, 1, (rows, groups))
    added = torch.randn(rows, groups) if offsets else None
    return QuantizedWeight(codes, scales, added, bits, dtype)


def in_double(weight: QuantizedWeight) -> torch.Tensor:
    """The weight in double precision, computed as the docstring of QuantizedWeight defines it."""
    exact = torch.empty(weight.shape, dtype=torch.double)
    for column in range(weight.shape[1]):
        group = column // weight.group
        exact[:, column] = weight.codes[:, column].double() * weight.scales[:, group].double()
        if weight.offsets is not None:
            exact[:, column] += weight.offsets[:, group].double()
    return exact


def assert_full_is_near(linear: NativeLinear, x: torch.Tensor, exact: torch.Tensor) -> None:
    size = x.double().abs().sum(1, keepdim=True) * exact.abs().max() + 1
    product = F.linear(x.double(), exact)
    assert ((linear.full(x).double() - product).abs() / size).max() < 2e-6


@settings(max_examples=60, deadline=None)
@given(_SHAPES, st.sampled_from([4, 8, FLOAT8]), st.booleans())
def test_a_projection_of_any_shape(
    native, shape: tuple[int, int, int], bits: int, offsets: bool
) -> None:
    torch.manual_seed(sum(shape))
    weight = drawn(*shape, bits, native.dtype, offsets=offsets)
    linear = NativeLinear(native.functions, LargePages(), weight, None)
    assert (linear.out_features, linear.in_features) == tuple(weight.shape)
    # In bfloat16, weights with groups of an odd width are stored unquantized.
    is_odd = native.dtype is torch.bfloat16 and shape[1] > 1 and shape[2] % 2
    exact = weight.dequantized().double() if is_odd else in_double(weight)
    x = torch.randn(max(ROWS), weight.shape[1]).to(native.dtype)
    together = linear.full(x)
    assert_full_is_near(linear, x, exact)
    for rows in ROWS:
        assert torch.equal(linear.full(x[:rows]), together[:rows])


@pytest.mark.parametrize(
    ("bits", "group"), [(8, 2816), (8, 32), (4, 128), (4, 2816), (FLOAT8, 128)]
)
def test_a_large_projection_is_computed_in_several_blocks(native, bits: int, group: int) -> None:
    """The kernel must cut the weight: it has more rows than a block, a depth of several chunks, and
    column panels for two threads. The number of panels is odd, although the kernel for few rows
    multiplies pairs of panels.
    """
    torch.manual_seed(1)
    weight = drawn(800, 2816 // group, group, bits, native.dtype, offsets=True)
    bias = torch.randn(800).to(native.dtype)
    linear = NativeLinear(native.functions, LargePages(), weight, bias)
    x = torch.randn(300, 2816).to(native.dtype)
    together = linear(x)
    exact = F.linear(x.double(), in_double(weight), bias.double())
    error = (together.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < (1e-6 if native.dtype is torch.float32 else 3e-3)
    for first, count in ((0, 1), (299, 1), (5, 4), (7, 12), (100, 13), (3, 130)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])
    torch.set_num_threads(1)
    try:
        assert torch.equal(linear(x), together)
    finally:
        torch.set_num_threads(2)


@pytest.mark.parametrize("bits", [4, 8, FLOAT8])
@pytest.mark.parametrize("inner", [3, 40, 96])
def test_a_gated_projection_of_quantized_weights_is_that_of_the_dequantized(
    native, inner: int, bits: int
) -> None:
    torch.manual_seed(2)
    weight = drawn(2 * inner, 2, 32, bits, native.dtype, offsets=False)
    weight = replace(weight, scales=weight.scales * 0.1)
    bias = torch.randn(2 * inner).to(native.dtype)
    linear = native.kernels.gated_linear(weight, bias, Activation.SILU)
    twin = TorchKernels().gated_linear(weight, bias, Activation.SILU)
    x = torch.randn(20, 64).to(native.dtype)
    gate, up = F.linear(x.double(), in_double(weight), bias.double()).chunk(2, dim=-1)
    exact = F.silu(gate) * up
    for rows in (4, 20):
        for output in (linear(x[:rows]), twin(x[:rows])):
            error = (output.double() - exact[:rows]).square().mean().sqrt()
            assert error / exact.square().mean().sqrt() < native.tolerance


def test_weights_are_rounded_to_the_nearest_of_255_numbers_of_each_row() -> None:
    weight = torch.tensor([[0.5, -1.27, 0.004, 0.006], [0.0, 0.0, 0.0, 0.0], [3e4, 1.0, 119, 0]])
    quantized = quantize_int8(weight)
    assert quantized.codes.tolist() == [[50, -127, 0, 1], [0, 0, 0, 0], [127, 0, 1, 0]]
    assert torch.allclose(quantized.scales[:, 0], torch.tensor([0.01, 0.0, 3e4 / 127]))
    assert torch.equal(quantized.dequantized()[1], weight[1])


def test_weights_that_are_quantized_differently_keep_their_values_when_stacked() -> None:
    parts = [
        drawn(3, 6, 4, 8, torch.float32, offsets=False),
        drawn(5, 4, 6, 4, torch.float32, offsets=True),
        drawn(2, 1, 24, 4, torch.float32, offsets=False),
    ]
    both = stacked(parts)
    assert (both.shape, both.bits, both.group) == ((10, 24), 8, 2)
    assert torch.equal(both.dequantized(), torch.cat([one.dequantized() for one in parts]))
    assert stacked(parts[2:] * 2).bits == 4
    floats = drawn(3, 2, 4, FLOAT8, torch.float32, offsets=False)
    assert torch.equal(stacked([floats] * 2).dequantized()[3:], floats.dequantized())
    with pytest.raises(
        ValueError, match=("some of these weights are quantized to integers and some to floats")
    ):
        stacked([floats, drawn(3, 2, 4, 8, torch.float32, offsets=False)])
    with pytest.raises(ValueError, match="some of these weights are quantized and some are not"):
        stacked([parts[0], parts[1].dequantized()])


def test_columns_of_several_groups_are_whole_groups() -> None:
    weight = drawn(3, 4, 8, 4, torch.float32, offsets=True)
    part = weight.columns(slice(8, 24))
    assert torch.equal(part.dequantized(), weight.dequantized()[:, 8:24])
    with pytest.raises(ValueError, match="columns 4 to 24 are not whole groups of 8 columns"):
        weight.columns(slice(4, 24))
