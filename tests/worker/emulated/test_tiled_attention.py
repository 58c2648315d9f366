"""Attention by emulated tile instructions equals a scalar model, for any rows together."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.worker.backends.native import library
from tests.worker.programs import compiled_program
from tests.worker.unit.backends.test_native_attention_is_exact import WAYS, Inputs

PROGRAM = """
#include "exports.h"
using namespace stepwell;

extern "C" void attend(const AttentionLayer& layer, const Layout& layout,
                       const Heads<BFloat16>& heads, const Pages& pages, BFloat16* output) {
  attend_in_team(layer, layout, heads, pages, output);
}

// Stores a request's keys and values in the pages of the last key head. Then computes the products
// of a block: scores [rows][BLOCK_KEYS], and totals [rows][padded dim] += weights * values.
extern "C" void multiply_block(const AttentionLayer& layer, const Layout& layout,
                               const Pages& pages, const BFloat16* keys, const BFloat16* values,
                               int is_single, int rows, const BFloat16* queries, float* scores,
                               const float* weights, float* totals) {
  const ComputeScope<BFloat16> scope;
  const AttentionPlan plan(layer, layout, pages.block_size, 1);
  PlainProducts<BFloat16> products(plan, pages);
  const int dim = layer.head_dim, head = layer.num_kv_heads - 1;
  for (int token = 0; token < layout.num_tokens(); ++token) {
    products.store(keys + token * dim, values + token * dim, head, plan.slots[token]);
  }
  Scratch scratch;
  scratch.reserve(products.bytes(rows, rows));
  products.take(scratch, rows, rows);
  for (int row = 0; row < rows; ++row) products.set_query(row, queries + row * dim);
  KeyBlock block;
  locate_block(layout.blocks(0), pages.block_size, products.token_stride(), 0, 0,
               layout.seq_lens[0], block);
  products.score({head, 0, rows, is_single != 0}, block, KeyBlock{});
  for (int row = 0; row < rows; ++row) {
    Vector own[BLOCK_PANELS];
    for (int panel = 0; panel < BLOCK_PANELS; ++panel) {
      const int place = row * BLOCK_KEYS + panel * LANES;
      store(scores + place, products.scores(row, panel));
      own[panel] = load(weights + place);
    }
    products.set_weights(row, own, 0, 0, BLOCK_KEYS);
  }
  products.add_values(SoftmaxSums(totals, rows, plan.padded_dim));
}
"""
BLOCK_KEYS, TILE_DEPTH, PANEL_WIDTH = 64, 32, 32


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = compiled_program(PROGRAM, tmp_path_factory.mktemp("tiles"))
    layer, layout, heads, pages = map(
        ctypes.POINTER, (library.AttentionLayer, library.Layout, library.Heads, library.Pages)
    )
    address, count = ctypes.c_void_p, ctypes.c_int
    loaded.attend.argtypes = layer, layout, heads, pages, address
    rows = count, count, *4 * (address,)
    loaded.multiply_block.argtypes = layer, layout, pages, address, address, *rows
    return loaded


def added(totals: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """totals + a @ b, added in the order of tiles: in each TILE_DEPTH elements of depth, the
    products of even and of odd elements are summed separately. Then the two sums are added, and the
    result is added to the totals. Products, and their sums with a float32, are exact in float64.
    """
    wide, deep = a.astype(np.float64), b.astype(np.float64)
    for first in range(0, len(b), TILE_DEPTH):
        sums = np.zeros((2, *totals.shape), np.float32)
        for d in range(first, min(first + TILE_DEPTH, len(b))):
            sums[d % 2] = (wide[:, d, None] * deep[d] + sums[d % 2]).astype(np.float32)
        totals = totals + (sums[0] + sums[1])
    return totals


def numbers(*shape: int) -> torch.Tensor:
    exponents = torch.rand(shape) * 14 - 7
    return (torch.exp2(exponents) * (torch.randint(0, 2, shape) * 2 - 1)).bfloat16()


@pytest.mark.parametrize(
    ("dim", "rows", "is_single"),
    [(64, 3, True), (40, 3, True), (112, 7, True), (64, 40, False), (80, 18, False)],
)
@pytest.mark.parametrize(("length", "block_size"), [(64, 16), (49, 3), (7, 16)])
def test_products_equal_a_scalar_model(
    tiled: ctypes.CDLL, dim: int, rows: int, is_single: bool, length: int, block_size: int
) -> None:
    torch.manual_seed(length)
    keys, values, queries = (numbers(count, dim) for count in (length, length, rows))
    weights = torch.zeros(rows, BLOCK_KEYS)
    weights[:, :length] = numbers(rows, length).abs()
    queries[1], weights[1] = torch.nan, torch.nan  # must not affect other rows
    padded = -(-dim // PANEL_WIDTH) * PANEL_WIDTH
    totals = np.zeros(rows * (padded + 17), np.float32)
    expected = totals[: rows * padded].reshape(rows, padded)[:, :dim] + added(
        np.ones((rows, dim), np.float32), weights[:, :length].numpy(), values.float().numpy()
    )
    totals[: rows * padded] = 1
    num_pages = -(-length // block_size)
    stored = torch.full((2, num_pages * block_size * 2 * dim), torch.nan).bfloat16()
    arrays = [np.array(numbers, np.int32) for numbers in ([0, length], [length], [0])]
    arrays.append(np.random.default_rng(1).permutation(num_pages).astype(np.int32))
    scores = np.zeros((rows, BLOCK_KEYS), np.float32)
    tiled.multiply_block(
        library.AttentionLayer(4, 2, dim, 1, 0, 0),
        library.Layout(1, *map(library.address, arrays), num_pages),
        library.Pages(stored[0].data_ptr(), stored[1].data_ptr(), block_size, 0),
        *(keys.data_ptr(), values.data_ptr(), is_single, rows, queries.data_ptr()),
        *(library.address(scores), weights.data_ptr(), library.address(totals)),
    )
    others = np.arange(rows) != 1
    found = totals[: rows * padded].reshape(rows, padded)[:, :dim]
    np.testing.assert_array_equal(found[others], expected[others])
    products = added(
        np.zeros((rows, length), np.float32), queries.float().numpy(), keys.T.float().numpy()
    )
    np.testing.assert_array_equal(scores[others, :length], products[others])


@pytest.mark.parametrize(
    ("case", "block_size"),
    [
        ("one query head of a key head", 3),
        ("three, fewer pairs than a head has", 16),
        ("a window longer than a part", 16),
    ],
)
def test_bits_do_not_depend_on_steps_threads_and_pages(
    tiled: ctypes.CDLL, case: str, block_size: int
) -> None:
    native = SimpleNamespace(functions=tiled)
    inputs = Inputs(case, torch.bfloat16)
    whole = inputs.outputs(native, [], threads=1)
    assert whole.isfinite().all()
    for counts in WAYS.values():
        found = inputs.outputs(native, counts, threads=2, block_size=block_size)
        assert torch.equal(found, whole)


def test_the_sign_of_zero_does_not_depend_on_the_rows_beside(tiled: ctypes.CDLL) -> None:
    """The sum of the two values is a denormal number, which becomes -0. Keys to which only other
    rows attend add a product of 0 to it.
    """
    native = SimpleNamespace(functions=tiled)
    inputs = Inputs("a window longer than a part", torch.bfloat16)
    query, key, value = (torch.zeros_like(part) for part in inputs.heads)
    value[0], value[BLOCK_KEYS] = 2.0**-126, -1.5 * 2.0**-126
    inputs.heads = query, key, value
    whole = inputs.outputs(native, [], threads=1)
    steps = inputs.outputs(native, [BLOCK_KEYS + 16, 1, 1], threads=1)
    assert torch.equal(steps.view(torch.int16), whole.view(torch.int16))
