"""Products of inputs and weights in 8 bits are exact sums times scales, with all kernels."""

import numpy as np
import numpy.typing as npt
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


def drawn(rows: int, columns: int, dtype: torch.dtype) -> QuantizedWeight:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, 1) * 10.0 ** torch.randint(-3, 1, (rows, 1))
    return QuantizedWeight(codes, scales, None, 8, dtype, quantizes_inputs=True)


def of_numpy(weight: QuantizedWeight, x: torch.Tensor) -> npt.NDArray[np.float32]:
    """The product without a bias, computed by NumPy. Inputs are rounded to multiples of a 127th of
    the row's largest magnitude. The integer sums of codes are multiplied by the scales in float32.
    """
    rows = x.float().numpy()
    most = np.abs(rows).max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(most == 0, 0, np.float32(127) / most)
    codes = np.rint(rows * inverse).astype(np.int64)
    sums = codes @ weight.codes.numpy().astype(np.int64).T
    scales = weight.scales.numpy().T * (most / np.float32(127))
    return sums.astype(np.float32) * scales


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 300))
def test_a_product_of_any_shape(native, rows: int, columns: int) -> None:
    torch.manual_seed(rows + columns)
    weight = drawn(rows, columns, native.dtype)
    linear = NativeLinear(native.functions, LargePages(), weight, None)
    x = torch.randn(max(ROWS), columns).to(native.dtype)
    x[1], x[2, -1] = 0, 1e4
    exact = of_numpy(weight, x)
    assert np.array_equal(TorchKernels().linear(weight, None).full(x).numpy(), exact)
    for count in ROWS:
        assert np.array_equal(linear.full(x[:count]).numpy(), exact[:count])


def test_a_large_product_is_computed_in_several_blocks(native) -> None:
    """The kernel must cut the weight: it has more rows than a block, a depth of several chunks, and
    column panels for two threads. The sums are too large to be exact in float32.
    """
    torch.manual_seed(1)
    weight, bias = drawn(800, 5632, native.dtype), torch.randn(800).to(native.dtype)
    weight.codes[5] = 127
    x = torch.randn(300, 5632).to(native.dtype)
    x[7] = 1
    linear = NativeLinear(native.functions, LargePages(), weight, bias)
    together = linear.full(x)
    exact = of_numpy(weight, x) + bias.float().numpy()
    np.testing.assert_allclose(together.numpy(), exact, rtol=3e-7, atol=1e-5)
    twin = TorchKernels().linear(weight, bias).full(x)
    np.testing.assert_allclose(twin.numpy(), exact, rtol=3e-7, atol=1e-5)
    for first, count in ((0, 1), (299, 1), (5, 4), (7, 12), (100, 13), (3, 130)):
        assert torch.equal(linear.full(x[first : first + count]), together[first : first + count])
    torch.set_num_threads(1)
    try:
        assert torch.equal(linear.full(x), together)
    finally:
        torch.set_num_threads(2)
    assert torch.equal(linear(x), together.to(native.dtype))


@pytest.mark.parametrize("inner", [3, 40, 96])
def test_a_gated_product_is_the_activation_of_one_half_times_the_other(native, inner: int) -> None:
    torch.manual_seed(2)
    weight, bias = drawn(2 * inner, 64, native.dtype), torch.randn(2 * inner).to(native.dtype)
    weight.scales.mul_(0.01)
    x = torch.randn(20, 64).to(native.dtype)
    product = torch.from_numpy(of_numpy(weight, x)).double() + bias.double()
    gate, up = product.chunk(2, dim=-1)
    exact = F.silu(gate) * up
    for kernels in (native.kernels, TorchKernels()):
        output = kernels.gated_linear(weight, bias, Activation.SILU)(x)
        error = (output.double() - exact).square().mean().sqrt()
        assert error / exact.square().mean().sqrt() < native.tolerance


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_only_rows_with_infinite_or_nan_inputs_have_results_that_are_not_finite(
    native, value: float
) -> None:
    weight = drawn(40, 64, native.dtype)
    x = torch.randn(14, 64).to(native.dtype)
    x[3, 50] = value
    for kernels in (native.kernels, TorchKernels()):
        finite = kernels.linear(weight, None)(x).isfinite()
        assert not finite[3].any()
        assert finite[torch.arange(14) != 3].all()


def test_stacked_weights_must_all_quantize_their_inputs_or_none() -> None:
    both = stacked([drawn(3, 8, torch.float32), drawn(5, 8, torch.float32)])
    assert both.quantizes_inputs
    assert both.columns(slice(2, 6)).rows(slice(1, 7)).quantizes_inputs
    with pytest.raises(
        ValueError, match=("some of these weights are for quantized inputs and some are not")
    ):
        stacked([both, quantize_int8(torch.randn(2, 8))])


def test_sums_that_do_not_fit_are_refused(native) -> None:
    deepest = (2**31 - 1) // (127 * 128)
    codes = torch.full((1, deepest), -128, dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.ones(1, 1), None, 8, native.dtype, quantizes_inputs=True)
    x = torch.ones(1, deepest, dtype=native.dtype)
    for kernels in (native.kernels, TorchKernels()):
        assert kernels.linear(weight, None).full(x).item() == -128.0 * deepest
    with pytest.raises(ValueError, match=f"products with {deepest + 1} inputs of 8 bits"):
        quantize_int8(torch.ones(1, deepest + 1), quantizes_inputs=True)
