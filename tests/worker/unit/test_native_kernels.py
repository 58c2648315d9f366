"""The operations in C++ equal their torch twins, computed in double precision."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.kernels.interface import Activation
from services.worker.kernels.native_linear import NativeLinear


def drawn(native, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(native.dtype)


def assert_near(native, actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype is native.dtype
    torch.testing.assert_close(
        actual.double(), expected, atol=native.tolerance, rtol=native.tolerance
    )


@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (33, 96), (7, 48), (64, 2)])
def test_a_projection_of_any_number_of_rows(native, out_features: int, in_features: int) -> None:
    torch.manual_seed(1)
    weight = drawn(native, out_features, in_features, scale=in_features**-0.5)
    bias = drawn(native, out_features)
    linear = NativeLinear(native.functions, weight, bias)
    assert (linear.in_features, linear.out_features) == (in_features, out_features)
    for rows in (1, 2, 3, 5, 8, 12, 13, 31, 200):
        x = drawn(native, rows, in_features)
        assert_near(native, linear(x), F.linear(x.double(), weight.double(), bias.double()))


ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda gate: F.gelu(gate, approximate="tanh"),
}


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("inner", "in_features"), [(1536, 96), (40, 48), (3, 8)])
def test_a_gated_projection(native, inner: int, in_features: int, activation: Activation) -> None:
    torch.manual_seed(2)
    weight = drawn(native, 2 * inner, in_features, scale=2 * in_features**-0.5)
    bias = drawn(native, 2 * inner)
    linear = NativeLinear(native.functions, weight, bias, activation)
    for rows in (1, 4, 17):
        x = drawn(native, rows, in_features)
        gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=-1)
        assert_near(native, linear(x), ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("activation", Activation)
def test_a_gate_far_from_zero_is_closed_or_open(native, activation: Activation) -> None:
    gates = torch.tensor([-1e4, -100.0, -89.0, 0.0, 89.0, 1e4]).to(native.dtype)
    weight = torch.cat((gates, torch.ones(6, dtype=native.dtype)))[:, None].expand(12, 2).clone()
    weight[:, 1] = 0
    linear = NativeLinear(native.functions, weight, None, activation)
    output = linear(torch.ones(1, 2, dtype=native.dtype))
    assert_near(native, output, ACTIVATIONS[activation](gates.double())[None])


def test_a_row_does_not_depend_on_those_beside_it(native) -> None:
    torch.manual_seed(3)
    linear = NativeLinear(native.functions, drawn(native, 200, 256), None)
    x = drawn(native, 29, 256)
    together = linear(x)
    for row in range(29):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


def test_an_odd_width_is_left_to_torch(native) -> None:
    kernels = native.kernels
    weight = drawn(native, 8, 5)
    x = drawn(native, 4, 5)
    assert_near(native, kernels.linear(weight, None)(x), F.linear(x.double(), weight.double()))
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    assert_near(native, kernels.gated_linear(weight, None, Activation.SILU)(x), F.silu(gate) * up)


@pytest.mark.parametrize("width", [8, 16, 40, 577, 2048])
def test_norms(native, width: int) -> None:
    torch.manual_seed(4)
    kernels = native.kernels
    weight = kernels.norm_weight(drawn(native, width))
    residual, update = drawn(native, 5, width), drawn(native, 5, width)
    expected = residual + update
    normalized = kernels.add_rms_norm(residual, update, weight, 1e-5)
    assert torch.equal(residual, expected)
    for actual in (normalized, kernels.rms_norm(expected, weight, 1e-5)):
        exact = F.rms_norm(expected.double(), (width,), weight.double(), 1e-5)
        assert_near(native, actual, exact)


def test_norms_of_some_heads_of_a_fused_projection(native) -> None:
    torch.manual_seed(5)
    heads, weight = drawn(native, 7, 6, 40), native.kernels.norm_weight(drawn(native, 40))
    actual = native.kernels.rms_norm(heads[:, 2:5], weight, 1e-6)
    assert actual.is_contiguous()
    assert_near(native, actual, F.rms_norm(heads[:, 2:5].double(), (40,), weight.double(), 1e-6))
