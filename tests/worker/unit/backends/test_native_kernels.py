"""The operations in C++ compute the results of torch's operations in double precision."""

import os

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.choices import Activation
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.linear import NativeLinear


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
    linear = NativeLinear(native.functions, LargePages(), weight, bias)
    assert (linear.in_features, linear.out_features) == (in_features, out_features)
    for rows in (1, 2, 3, 5, 8, 12, 13, 31, 200):
        x = drawn(native, rows, in_features)
        assert_near(native, linear(x), F.linear(x.double(), weight.double(), bias.double()))


def test_full_results_are_not_rounded(native) -> None:
    torch.manual_seed(6)
    weight, bias = drawn(native, 70, 96, scale=96**-0.5), drawn(native, 70)
    plain = NativeLinear(native.functions, LargePages(), weight, bias)
    gated = NativeLinear(native.functions, LargePages(), weight, bias, Activation.SILU)
    for rows in (1, 13, 200):
        x = drawn(native, rows, 96)
        exact = F.linear(x.double(), weight.double(), bias.double())
        gate, up = exact.chunk(2, dim=-1)
        for linear, expected in ((plain, exact), (gated, F.silu(gate) * up)):
            full = linear.full(x)
            assert full.dtype is torch.float32
            torch.testing.assert_close(full.double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(full.to(native.dtype), linear(x))


ACTIVATIONS = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda gate: F.gelu(gate, approximate="tanh"),
}


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("inner", "in_features"), [(1536, 96), (40, 48), (3, 8)])
def test_a_gated_projection_is_the_activation_of_one_half_times_the_other(
    native, inner: int, in_features: int, activation: Activation
) -> None:
    torch.manual_seed(2)
    weight = drawn(native, 2 * inner, in_features, scale=2 * in_features**-0.5)
    bias = drawn(native, 2 * inner)
    linear = NativeLinear(native.functions, LargePages(), weight, bias, activation)
    for rows in (1, 4, 17):
        x = drawn(native, rows, in_features)
        gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=-1)
        assert_near(native, linear(x), ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("activation", Activation)
def test_a_gate_far_from_zero_is_closed_or_open(native, activation: Activation) -> None:
    gates = torch.tensor([-1e4, -100.0, -89.0, 0.0, 89.0, 1e4]).to(native.dtype)
    weight = torch.cat((gates, torch.ones(6, dtype=native.dtype)))[:, None].expand(12, 2).clone()
    weight[:, 1] = 0
    linear = NativeLinear(native.functions, LargePages(), weight, None, activation)
    output = linear(torch.ones(1, 2, dtype=native.dtype))
    assert_near(native, output, ACTIVATIONS[activation](gates.double())[None])


# Narrow and wide matrices, with one or several chunks of depth.
@pytest.mark.parametrize("in_features", [256, 1100, 2048, 5632])
def test_a_row_does_not_depend_on_other_rows(native, in_features: int) -> None:
    torch.manual_seed(3)
    weight, bias = drawn(native, 200, in_features, scale=in_features**-0.5), drawn(native, 200)
    linear = NativeLinear(native.functions, LargePages(), weight, bias)
    x = drawn(native, 250, in_features)
    together = linear(x)
    assert_near(native, together, F.linear(x.double(), weight.double(), bias.double()))
    for first, count in ((0, 1), (249, 1), (7, 2), (0, 12), (100, 13), (12, 31), (3, 130)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize("activation", [None, *Activation])
def test_the_number_of_threads_does_not_change_results(
    native, activation: Activation | None
) -> None:
    torch.manual_seed(7)
    weight = drawn(native, 2 * 420, 1536, scale=1536**-0.5)
    linear = NativeLinear(native.functions, LargePages(), weight, None, activation)
    x = drawn(native, 301, 1536)
    try:
        for rows in (32, 301):
            together = linear(x[:rows])
            torch.set_num_threads(1)
            assert torch.equal(linear(x[:rows]), together)
            torch.set_num_threads(2)
    finally:
        torch.set_num_threads(2)


def test_delayed_threads_compute_every_panel_once(native) -> None:
    torch.manual_seed(7)
    linear = NativeLinear(native.functions, LargePages(), drawn(native, 1000, 2048), None)
    x = drawn(native, 9, 2048)
    torch.set_num_threads(1)
    alone = linear(x)
    torch.set_num_threads(7)  # other threads compute the panels of threads without a processor
    try:
        for _ in range(200):
            assert torch.equal(linear(x), alone)
    finally:
        torch.set_num_threads(2)


def test_the_callers_processor_mask_is_restored(native) -> None:
    linear = NativeLinear(native.functions, LargePages(), drawn(native, 1000, 2048), None)
    x = drawn(native, 64, 2048)
    before = os.sched_getaffinity(0)
    try:
        for num_threads in (len(before), len(before) + 1):
            torch.set_num_threads(num_threads)
            linear(x)
            assert os.sched_getaffinity(0) == before
    finally:
        torch.set_num_threads(2)


@pytest.mark.parametrize("activation", [None, *Activation])
def test_a_width_that_is_no_multiple_of_lanes_is_computed_too(
    native, activation: Activation | None
) -> None:
    weight, bias = drawn(native, 8, 35, scale=0.2), drawn(native, 8)
    x = drawn(native, 14, 35)
    exact = F.linear(x.double(), weight.double(), bias.double())
    if activation is None:
        linear = native.kernels.linear(weight, bias)
    else:
        linear = native.kernels.gated_linear(weight, bias, activation)
        gate, up = exact.chunk(2, dim=-1)
        exact = ACTIVATIONS[activation](gate) * up
    together = linear(x)
    assert (linear.in_features, linear.out_features) == (35, together.shape[1])
    assert_near(native, together, exact)
    assert torch.equal(linear.full(x).to(native.dtype), together)
    for row in range(14):
        assert torch.equal(linear(x[row : row + 1]), together[row : row + 1])


def test_denormals_are_kept_even_if_the_process_flushes_them(native) -> None:
    """If only some threads flushed small numbers to zero, results would depend on the thread."""
    linear = NativeLinear(
        native.functions, LargePages(), drawn(native, 1000, 2048, scale=1e-21), None
    )
    x = drawn(native, 64, 2048, scale=1e-18)
    expected = [linear.full(x[:rows]).view(torch.int32) for rows in (1, 64)]
    assert torch.set_flush_denormal(True)
    try:
        actual = [linear.full(x[:rows]).view(torch.int32) for rows in (1, 64)]
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    if native.dtype is torch.float32:  # bfloat16 dot products always flush
        assert any(rows.any() for rows in expected)


@pytest.mark.parametrize("width", [8, 16, 40, 577, 2048])
def test_norms_are_torchs_and_the_residual_is_added_in_place(native, width: int) -> None:
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
