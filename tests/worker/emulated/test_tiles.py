"""Tile instructions, emulated and in hardware, compute the results that an Intel Xeon computed.

Each record in recorded_tiles.npz has the instruction, the shape (rows, 32-bit groups of depth,
columns), the tiles `a` and `b`, and the tile of totals `before` and `after` the instruction.
Elements of `a`, `b` and `before` outside the shape are arbitrary.
"""

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.worker.backends.native import tiles
from services.worker.backends.native.compiled import processor_features
from tests.worker.programs import compiled_program

RECORDED = np.load(Path(__file__).with_name("recorded_tiles.npz"))
INSTRUCTIONS = ("TDPBF16PS", "TDPBSSD", "TDPBSUD", "TDPBUSD", "TDPBUUD")
PROGRAM = """
#include "panel.h"
using namespace stepwell;
using I8 = std::int8_t;
using U8 = std::uint8_t;

// c += a * b with tiles of a shape: rows, 32-bit groups of depth, columns.
extern "C" void multiply_tiles(int instruction, const std::uint8_t* shape, const void* a,
                               const void* b, void* c) {
  TileShapes shapes;
  shapes.set(0, shape[0], 4 * shape[2]);
  shapes.set(1, shape[0], 4 * shape[1]);
  shapes.set(2, shape[1], 4 * shape[2]);
  tiles::configure(shapes);
  tiles::load<0>(c, 64);
  tiles::load<1>(a, 64);
  tiles::load<2>(b, 64);
  switch (instruction) {
    case 0: tiles::multiply_bfloat16<0, 1, 2>(); break;
    case 1: tiles::multiply_bytes<0, 1, 2, I8, I8>(); break;
    case 2: tiles::multiply_bytes<0, 1, 2, I8, U8>(); break;
    case 3: tiles::multiply_bytes<0, 1, 2, U8, I8>(); break;
    case 4: tiles::multiply_bytes<0, 1, 2, U8, U8>(); break;
  }
  tiles::store<0>(c, 64);
  tiles::release();
}

// totals [3][16] += rows a [3][2 * steps] times a panel of 16 columns, without tiles.
extern "C" void multiply_rows(const BFloat16* a, const BFloat16* panel, int steps, float* totals) {
  const ComputeScope<BFloat16> scope;
  Vector sums[3][1] = {{load(totals)}, {load(totals + 16)}, {load(totals + 32)}};
  multiply<BFloat16, 3, 1, false, LANES>(sums, a, 2 * steps, panel, steps);
  for (int row = 0; row < 3; ++row) store(totals + 16 * row, sums[row][0]);
}
"""

WITH_SMALL_STACK = """
import ctypes
from services.worker.backends.native import tiles

class SignalStack(ctypes.Structure):
    _fields_ = [("first", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
stack = SignalStack(ctypes.addressof(memory), 0, len(memory))
print(ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None), tiles.refusal())
"""

Compile = Callable[[tuple[str, ...]], ctypes.CDLL]


@pytest.fixture(scope="module")
def compile_program(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    scratch = tmp_path_factory.mktemp("tiles")
    return lambda flags: compiled_program(PROGRAM, scratch, ("-march=native", *flags))


@pytest.fixture(scope="module")
def emulated(compile_program: Compile) -> ctypes.CDLL:
    return compile_program(tiles.EMULATED_FLAGS)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def assert_as_recorded(library: ctypes.CDLL) -> None:
    """Compares all bits of all recorded results, including NaN and infinities."""
    assert set(RECORDED["instruction"]) == set(INSTRUCTIONS)
    records = zip(*(RECORDED[name] for name in ("instruction", "shape", "a", "b")), strict=True)
    for i, (instruction, shape, a, b) in enumerate(records):
        rows, _, columns = shape
        found = RECORDED["before"][i].copy()
        number = INSTRUCTIONS.index(instruction)
        library.multiply_tiles(number, *map(pointer, (shape, a.copy(), b.copy(), found)))
        expected = RECORDED["after"][i][:rows, :columns]
        np.testing.assert_array_equal(found[:rows, :columns], expected, f"record {i}")


def test_the_emulation_equals_recorded_results(emulated: ctypes.CDLL) -> None:
    assert_as_recorded(emulated)


@pytest.fixture(scope="module")
def _hardware() -> None:
    if not processor_features() >= tiles.FEATURES or tiles.refusal() is not None:
        pytest.skip("this process has no tile registers")


@pytest.mark.usefixtures("_hardware")
def test_linux_refuses_tiles_to_a_process_with_a_small_signal_stack() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", WITH_SMALL_STACK], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"0 {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.usefixtures("_hardware")
def test_the_hardware_equals_recorded_results(compile_program: Compile) -> None:
    assert_as_recorded(compile_program(tiles.FLAGS))


@pytest.mark.parametrize("pairs", [1, 15, 16, 17, 32, 40])
def test_rows_without_tiles_have_the_same_bits(emulated: ctypes.CDLL, pairs: int) -> None:
    """A tile has 16 pairs of elements. The last one has fewer if 16 does not divide `pairs`."""
    random = np.random.default_rng(pairs)
    # Bit ranges for products near the smallest normal number, sums that cancel, common numbers.
    for low, high in ((1, 0x2000), (0x3F00, 0x3F90), (0x3800, 0x4300)):
        signs = random.integers(0, 2, (3 + 16, 2 * pairs), np.uint16) << 15
        bits = random.integers(low, high, signs.shape, np.uint16) | signs
        a, columns = bits[:3].copy(), bits[3:]
        panel = columns.reshape(16, pairs, 2).transpose(1, 0, 2).copy()
        totals = random.standard_normal((3, 16)).astype(np.float32) * np.float32(2.0**-120)
        expected = totals.copy()
        emulated.multiply_rows(pointer(a), pointer(panel), pairs, pointer(totals))
        for first in range(0, pairs, 16):
            count = min(16, pairs - first)
            tile, block = np.zeros((3, 32), np.uint16), panel[first : first + 16].copy()
            tile[:, : 2 * count] = a[:, 2 * first : 2 * (first + count)]
            shape = np.array([3, count, 16], np.uint8)
            emulated.multiply_tiles(0, *map(pointer, (shape, tile, block, expected)))
        np.testing.assert_array_equal(totals.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((17, 16, 16), "shape"), ((0, 16, 16), "shape"), ((16, 16, 17), "shape")],
)
def test_the_emulation_ends_the_process_where_hardware_faults(
    emulated: ctypes.CDLL, shape: tuple[int, ...], reason: str
) -> None:
    call = (
        "import ctypes, numpy as np; a = np.zeros(9999, np.float32).ctypes.data;"
        f"p = ctypes.c_void_p(a); s = bytes({list(shape)});"
        f"ctypes.CDLL({emulated._name!r}).multiply_tiles(0, s, p, p, p)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", call], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (-6, f"emulated tiles: {reason}\n")
