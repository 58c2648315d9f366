"""Matrix products by emulated tile instructions have the same bits as the products of a model in
NumPy.
"""

import numpy as np
import pytest
import torch

from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import Functions
from services.worker.backends.native.linear import NativeLinear
from services.worker.backends.quantized import QuantizedWeight, quantized_rows
from tests.worker.programs import compiled_program

PROGRAM = """
#include "exports.h"

namespace stepwell {

// project_in_team without adapters, whose code takes as long to compile as everything else.
void project_alone(const Projection<BFloat16>& projection, const BFloat16* input, float* output,
                   std::int64_t rows, const LoraDelta<BFloat16>*) {
  in_team<ComputeScope<BFloat16>>(
      threads_for(projection_work(projection, rows)),
      [&](Team team) { project(projection, input, output, rows, team); });
}

extern "C" int panel_width() { return PANEL_WIDTH; }
extern "C" int adds_like_tiles() { return SUMS_LIKE_TILES<BFloat16>; }
extern "C" const auto pack_weight_bfloat16 = &pack_weight<BFloat16>;
extern "C" const auto pack_quantized_bfloat16 = &pack_quantized<BFloat16>;
extern "C" const auto panel_bytes_bfloat16 = &panel_bytes<BFloat16>;
extern "C" const auto project_full_bfloat16 = &project_alone;

// Functions that the tests do not call.
extern "C" void* const project_bfloat16 = nullptr;
extern "C" void* const rms_norm_bfloat16 = nullptr;
extern "C" void* const attend_bfloat16 = nullptr;
extern "C" void* const run_decoder_bfloat16 = nullptr;

}  // namespace stepwell
"""
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257)
COLUMNS = 70


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Functions:
    library = compiled_program(PROGRAM, tmp_path_factory.mktemp("tiles"))
    assert library.adds_like_tiles()
    return Functions(library, "bfloat16")


def added(total: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`total` + x times the transposed weight, added in the order of tiles: in each 32 elements of
    depth, products at even and at odd depths are summed separately. Each addition is rounded once
    to float32, because products of bfloat16 numbers are exact in double precision.
    """
    for first in range(0, x.shape[1], 32):
        sums = np.zeros((2, len(x), len(weight)), np.float32)
        for d in range(first, min(first + 32, x.shape[1])):
            product = x[:, d, None].astype(np.float64) * weight[:, d]
            sums[d % 2] = (sums[d % 2] + product).astype(np.float32)
        total = total + (sums[0] + sums[1])
    return total


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy()


def assert_same(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("depth", [32, 64, 576, 1536, 35, 40, 330])
def test_every_number_of_rows_has_the_bits_of_the_model(emulated: Functions, depth: int) -> None:
    torch.manual_seed(depth)
    weight, bias, x = drawn(COLUMNS, depth), drawn(COLUMNS), drawn(max(ROWS), depth)
    linear = NativeLinear(emulated, LargePages(), weight, bias)
    expected = added(
        np.broadcast_to(in_numpy(bias), (len(x), COLUMNS)), in_numpy(x), in_numpy(weight)
    )
    for rows in ROWS:
        assert_same(linear.full(x[-rows:]), expected[-rows:])


@pytest.mark.parametrize("group", [16, 32, 96, 576])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_weights_have_the_bits_of_the_model(
    emulated: Functions, kind: str, group: int
) -> None:
    torch.manual_seed(group)
    depth = 576
    most = 8 if kind == "int4" else 127
    codes = torch.randint(-most, most, (COLUMNS, depth), dtype=torch.int8)
    if kind == "fp8":
        codes = (codes.float() / 32).to(torch.float8_e4m3fn)
    # The scales are powers of two, by which multiplications are exact.
    scales = 2.0 ** torch.randint(-9, -3, (COLUMNS, depth // group))
    weight = QuantizedWeight(
        codes, scales, None, bits=4 if kind == "int4" else 8, dtype=torch.bfloat16
    )
    linear = NativeLinear(emulated, LargePages(), weight, None)
    x = drawn(257, depth)
    expected = np.zeros((len(x), COLUMNS), np.float32)
    for first in range(0, depth, group):
        part = slice(first, first + group)
        zero = np.zeros_like(expected)
        sums = added(zero, in_numpy(x[:, part]), in_numpy(codes[:, part]))
        expected = expected + sums * scales[:, first // group].numpy()
    for rows in (1, 16, 33, 257):
        assert_same(linear.full(x[-rows:]), expected[-rows:])


@pytest.mark.parametrize("depth", [128, 640, 648])
def test_products_of_bytes_are_exact(emulated: Functions, depth: int) -> None:
    torch.manual_seed(depth)
    codes = torch.randint(-127, 128, (COLUMNS, depth), dtype=torch.int8)
    scales, x = torch.rand(COLUMNS, 1), drawn(257, depth)
    weight = QuantizedWeight(codes, scales, None, 8, torch.bfloat16, quantizes_inputs=True)
    linear = NativeLinear(emulated, LargePages(), weight, None)
    rows_of_codes, row_scales = quantized_rows(x)
    sums = (rows_of_codes.double() @ codes.double().T).float()
    expected = (sums * (scales.T * row_scales)).numpy()
    for rows in (1, 16, 33, 257):
        assert_same(linear.full(x[-rows:]), expected[-rows:])


def test_a_neighbours_nan_changes_nothing(emulated: Functions) -> None:
    torch.manual_seed(6)
    linear = NativeLinear(emulated, LargePages(), drawn(COLUMNS, 576), None)
    x = drawn(33, 576)
    expected = linear.full(x).numpy()
    for row in (0, 15, 16, 32):
        spoiled = x.clone()
        spoiled[row] = torch.nan
        found = linear.full(spoiled)
        assert found[row].isnan().all()
        others = [other for other in range(33) if other != row]
        assert_same(found[others], expected[others])
