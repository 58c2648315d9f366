"""Sums of products of bytes are exact with every instruction set for which there is code."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.worker.programs import compiled_program

LANES = 16
WAYS = {
    "avx2": (("-march=x86-64-v3",), {"avx2", "fma"}),
    "avx_vnni": (("-march=x86-64-v3", "-mavxvnni"), {"avx2", "fma", "avx_vnni"}),
    "avx512": (("-march=x86-64-v4",), {"avx512f", "avx512bw"}),
    "avx512_vnni": (("-march=x86-64-v4", "-mavx512vnni"), {"avx512bw", "avx512_vnni"}),
}
"""Pairs of compiler flags and the processor features that they require."""
PROGRAM = """
#include "quads.h"
using namespace stepwell;

extern "C" void sums(const KeyByte* keys, const KeyByte* query, const ValueByte* values,
                     const ValueByte* weights, int steps, float* scores, float* weighted) {
  Vector total[1][1] = {}, added[1][1] = {};
  multiply<KeyByte, 1, 1, false, LANES>(total, query, 0, keys, steps);
  multiply<ValueByte, 1, 1, false, LANES>(added, weights, 0, values, steps);
  store(scores, to_floats(total[0][0]));
  store(weighted, to_floats(added[0][0]));
}
"""


def assert_exact(sums: Callable[..., object], copy: Callable[[np.ndarray], np.ndarray]) -> None:
    """Compares sums of products of random bytes with exact sums. `sums` is the function of PROGRAM.
    `copy` copies an array into memory that `sums` can access.
    """
    random = np.random.default_rng(1)
    for steps in (1, 16, 64):
        keys = random.integers(0, 256, (steps, LANES, 4), np.uint8)
        query = random.integers(-128, 128, (steps, 4), np.int8)
        values = random.integers(-128, 128, (steps, LANES, 4), np.int8)
        weights = random.integers(0, 256, (steps, 4), np.uint8)
        keys[:, 0], query[:, :2] = 255, -128
        values[:, 0], weights[:, :2] = -128, 255
        scores, weighted = copy(np.zeros(LANES, np.float32)), copy(np.zeros(LANES, np.float32))
        sums(*map(copy, (keys, query, values, weights)), steps, scores, weighted)
        for found, panel, row in ((scores, keys, query), (weighted, values, weights)):
            expected = np.einsum("slk,sk->l", panel.astype(np.int64), row.astype(np.int64))
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_exact(way: str, tmp_path: Path) -> None:
    flags, needed = WAYS[way]
    sums = compiled_program(PROGRAM, tmp_path, flags, needed).sums
    pointer = np.ctypeslib.ndpointer()
    sums.argtypes = (*4 * (pointer,), ctypes.c_int, *2 * (pointer,))
    assert_exact(sums, np.copy)
