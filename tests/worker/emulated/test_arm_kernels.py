"""The kernels for ARM compute the results of references in double precision. A row has the same
bits with any number of rows, any chunks and any pages.
"""

import math

import numpy as np
import pytest

from services.worker.backends.native import library
from services.worker.backends.row_sampler import RowParameters
from services.worker.sampling.numpy_row_sampler import NumpyRowSampler
from tests.worker.emulated.arm import EmulatedLibrary

NUMBERS_OF_ROWS = (*range(1, 34), 64)
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
DEPTH = 96
PLAIN, INT8, INT4, FP8, W8A8 = range(5)
"""The weight formats, numbered as in the enumeration WeightFormat in cpp/quantized.h."""
LENGTH, TABLE = 100, 112
"""The number of tokens of the sequence, and the number that fits into its pages."""


RANDOM = np.random.default_rng()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    RANDOM.bit_generator.state = np.random.default_rng(7).bit_generator.state


class Elements:
    """Conversions between float64 and a data type of the kernels. bfloat16 numbers are stored as
    the upper halves of float32 numbers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tolerance = TOLERANCES[name]
        self.dtype = np.float32 if name == "float32" else np.uint16

    def of(self, values: np.ndarray) -> np.ndarray:
        single = np.asarray(values, np.float32)
        if self.dtype is np.float32:
            return single
        bits = single.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def values(self, elements: np.ndarray) -> np.ndarray:
        if self.dtype is np.uint16:
            elements = (elements.astype(np.uint32) << 16).view(np.float32)
        return elements.astype(np.float64)

    def drawn(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return self.of(RANDOM.standard_normal(shape) * scale)


@pytest.fixture(params=TOLERANCES)
def elements(request: pytest.FixtureRequest, arm: EmulatedLibrary) -> Elements:
    arm.clear()
    return Elements(request.param)


def assert_near(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def packed(
    arm: EmulatedLibrary, elements: Elements, projection: library.Projection, *source: np.ndarray
) -> library.Projection:
    """Packs a weight for the projection. `source`: elements, or codes, scales and offsets."""
    size = arm.call(f"*panel_bytes_{elements.name}", projection)
    panels = -(-projection.columns // arm.call("panel_width"))
    projection.packed = arm.address(arm.empty(panels * size, np.uint8))
    if projection.format == PLAIN:
        arm.call(f"*pack_weight_{elements.name}", projection, arm.copy(source[0]))
    else:
        addresses = [arm.address(arm.copy(part)) for part in source]
        weight = library.NativeQuantizedWeight(*addresses)
        arm.call(f"*pack_quantized_{elements.name}", projection, weight)
    return projection


def products(
    arm: EmulatedLibrary, elements: Elements, projection: library.Projection, x: np.ndarray
) -> np.ndarray:
    """The outputs of all rows. Asserts that they do not depend on the number of rows in a call."""
    given, width = arm.copy(x), projection.columns // (2 if projection.epilogue else 1)
    output = arm.empty((len(x), width), elements.dtype)
    begin, found = 0, []
    for rows in NUMBERS_OF_ROWS:
        begin = begin if begin + rows <= len(x) else 0
        output[...] = 0
        arm.call(f"*project_{elements.name}", projection, given[begin:], output, rows, 0)
        assert not output[rows:].any()
        found.append((begin, output[:rows].copy()))
        begin += rows
    _, whole = found[-1]
    for begin, part in found[:-1]:
        assert np.array_equal(part, whole[begin : begin + len(part)])
    return whole


@pytest.mark.parametrize("epilogue", range(3))
def test_projections(arm: EmulatedLibrary, elements: Elements, epilogue: int) -> None:
    columns = 70
    weight = elements.drawn(columns, DEPTH, scale=DEPTH**-0.5)
    bias, x = elements.drawn(columns), elements.drawn(64, DEPTH)
    where = arm.address(arm.copy(bias))
    projection = packed(
        *(arm, elements),
        library.Projection(None, where, columns, DEPTH, epilogue, PLAIN, 0, DEPTH),
        weight,
    )
    found = elements.values(products(arm, elements, projection, x))
    exact = elements.values(x) @ elements.values(weight).T + elements.values(bias)
    if epilogue:
        gate, up = np.split(exact, 2, axis=1)
        inner = gate if epilogue == 1 else 1.5957691216 * (gate + 0.044715 * gate**3)
        exact = gate / (1 + np.exp(-inner)) * up
    assert_near(found, exact, elements.tolerance)


def code_values(weight_format: int, codes: np.ndarray) -> np.ndarray:
    if weight_format != FP8:
        return codes.astype(np.float64)
    bits = codes.view(np.uint8).astype(np.int64)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    return np.where(bits & 128, -size, size)


@pytest.mark.parametrize("weight_format", [INT8, INT4, FP8, W8A8])
@pytest.mark.parametrize("group", [DEPTH, 32])
def test_quantized_projections(
    arm: EmulatedLibrary, elements: Elements, weight_format: int, group: int
) -> None:
    columns, has_offsets = 40, weight_format != W8A8
    group = group if has_offsets else DEPTH
    most = 8 if weight_format == INT4 else 128
    codes = RANDOM.integers(-most, most, (columns, DEPTH)).astype(np.int8)
    if weight_format == FP8:
        codes[codes & 127 == 127] = 0  # NaN
    scales = np.float32(RANDOM.uniform(0.5, 2, (columns, DEPTH // group)) / most)
    offsets = np.float32(RANDOM.standard_normal(scales.shape) * has_offsets)
    projection = packed(
        *(arm, elements),
        library.Projection(None, None, columns, DEPTH, 0, weight_format, has_offsets, group),
        *(codes, scales, offsets),
    )
    x = elements.drawn(64, DEPTH, scale=0.1)
    found = elements.values(products(arm, elements, projection, x))
    inputs = elements.values(x)
    if weight_format == W8A8:
        inputs = in_eight_bits(inputs)
    wide = np.repeat(scales, group, 1).astype(np.float64), np.repeat(offsets, group, 1)
    exact = inputs @ (code_values(weight_format, codes) * wide[0] + wide[1]).T
    assert_near(found, exact, elements.tolerance)


def test_norms(arm: EmulatedLibrary, elements: Elements) -> None:
    rows, width = 5, 72
    x, update = (arm.copy(elements.drawn(rows, width)) for _ in range(2))
    weight = arm.copy(np.float32(RANDOM.standard_normal(width)))
    output = arm.empty((rows, width), elements.dtype)
    total = elements.values(elements.of(elements.values(x) + elements.values(update)))
    name = f"*rms_norm_{elements.name}"
    arm.call(name, x, 1, width, update, weight, output, rows, width, real=1e-6)
    assert np.array_equal(elements.values(x), total)
    exact = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * weight
    assert_near(elements.values(output), exact, elements.tolerance)


def in_eight_bits(heads: np.ndarray) -> np.ndarray:
    """Quantizes heads [..., dim] to 8 bits, as cpp/codes.h describes, and dequantizes them. Codes
    are rounded in float32 as in the library, because ties could otherwise become other codes.
    """
    single = heads.astype(np.float32)
    largest, most = np.abs(single).max(-1, keepdims=True), np.float32(127)
    return np.rint(single * (most / largest)) * (largest / most).astype(np.float64)


class Sequence:
    """A sequence's attention inputs. `fused` has the heads of queries, keys and values."""

    num_heads, num_kv_heads, half = 6, 2, 12

    def __init__(self, elements: Elements, dim: int, window: int, softcap: float) -> None:
        self.elements, self.dim, self.window, self.softcap = elements, dim, window, softcap
        self.heads = self.num_heads + 2 * self.num_kv_heads
        self.fused = elements.drawn(LENGTH, self.heads, dim, scale=1.5)
        angles = RANDOM.uniform(0, 6, (LENGTH, self.half))
        self.cos, self.sin = elements.of(np.cos(angles)), elements.of(np.sin(angles))

    def outputs(
        self, arm: EmulatedLibrary, counts: list[int], page: int, cache_format: int
    ) -> np.ndarray:
        """The outputs of all tokens, in steps of `counts` tokens, with pages in shuffled order."""
        arm.clear()
        blocks = 1 + -(-TABLE // page)
        head = -(-self.dim // 16) * 16 + 4 if cache_format else self.dim
        kept = np.uint8 if cache_format else self.elements.dtype
        caches = [arm.empty((blocks * page, self.num_kv_heads, head), kept) for _ in range(2)]
        for cache in caches:
            cache[...] = 255  # NaN, or codes that would change the results
        pages = library.Pages(*map(arm.address, caches), page, cache_format)
        table = arm.copy(np.random.default_rng(page).permutation(blocks - 1).astype(np.int32) + 1)
        layer = library.AttentionLayer(
            *(self.num_heads, self.num_kv_heads, self.dim),
            *(self.dim**-0.5, self.window, self.softcap),
        )
        fused, cos, sin = map(arm.copy, (self.fused, self.cos, self.sin))
        output = arm.empty((LENGTH, self.num_heads * self.dim), self.elements.dtype)
        begin, row = 0, arm.copy(np.zeros(1, np.int32))
        for count in counts:
            starts = arm.copy(np.array([0, count], np.int32))
            length = arm.copy(np.array([begin + count], np.int32))
            layout = library.Layout(1, *map(arm.address, (starts, length, row, table)), len(table))
            own = fused[begin:]
            first = 0, self.num_heads, self.num_heads + self.num_kv_heads
            parts = [arm.address(own[:, head:]) for head in first]
            rotation = arm.address(cos[begin:]), arm.address(sin[begin:])
            strides = 3 * (self.heads * self.dim,)
            heads = library.Heads(*parts, *strides, *rotation, self.half)
            name = f"*attend_{self.elements.name}"
            arm.call(name, layer, layout, heads, pages, output[begin:])
            begin += count
        return output.copy()

    def exact(self, cache_format: int) -> np.ndarray:
        """The outputs in double precision. With cache codes, keys and values are quantized."""
        values = self.elements.values(self.fused)
        cos, sin = (self.elements.values(part)[:, None] for part in (self.cos, self.sin))
        end = 2 * self.half
        first, second = values[:, :, : self.half], values[:, :, self.half : end]
        turned = first * cos - second * sin, second * cos + first * sin
        rotated = np.concatenate((*turned, values[:, :, end:]), axis=2)
        rotated = self.elements.values(self.elements.of(rotated))
        keys = rotated[:, self.num_heads : -self.num_kv_heads]
        values = values[:, -self.num_kv_heads :]
        if cache_format:
            keys, values = map(in_eight_bits, (keys, values))
        past = np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
        is_hidden = (past < 0) | (past >= (self.window or LENGTH))
        outputs = []
        for head in range(self.num_heads):
            kv_head = head // (self.num_heads // self.num_kv_heads)
            scores = rotated[:, head] @ keys[:, kv_head].T * self.dim**-0.5
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            scores[is_hidden] = -math.inf
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            outputs.append(weights @ values[:, kv_head])
        return np.concatenate(outputs, axis=1)


WAYS = ((16, [1, 7, 33, 2, 45, *12 * [1]]), (3, [*5 * [1], 64, 31]), (64, [70, 30]))
"""Pairs of a page's number of tokens and the numbers of tokens of the steps."""


@pytest.mark.parametrize("cache_format", [0, 1], ids=["elements", "codes"])
@pytest.mark.parametrize(("dim", "window", "softcap"), [(64, 0, 0.0), (40, 50, 20.0)])
def test_attention(
    arm: EmulatedLibrary,
    elements: Elements,
    cache_format: int,
    dim: int,
    window: int,
    softcap: float,
) -> None:
    sequence = Sequence(elements, dim, window, softcap)
    whole = sequence.outputs(arm, [LENGTH], 16, cache_format)
    tolerance = max(1e-3, 3 * elements.tolerance)
    assert_near(elements.values(whole), sequence.exact(cache_format), tolerance)
    for page, counts in WAYS:
        others = sequence.outputs(arm, counts, page, cache_format)
        assert np.array_equal(others, whole), (page, counts)


def test_tokens_are_drawn_as_numpy_draws_them(arm: EmulatedLibrary) -> None:
    arm.clear()
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.3, 0, 0.9, 0.05)]
    count, size = 10 * len(kinds), 1003
    values = np.array(10 * kinds, np.float64).T.copy()
    values[0] = values[0].astype(np.float32)
    drawn = RowParameters(
        values, RANDOM.integers(2**64, size=count, dtype=np.uint64), RANDOM.integers(9, size=count)
    )
    logits, rows = RANDOM.standard_normal((count, size)).astype(np.float32) * 4, np.arange(count)
    token_ids = arm.empty(count, np.int64)
    given, which = arm.address(arm.copy(logits)), arm.address(arm.copy(rows))
    parts = (arm.copy(part) for part in (drawn.values, drawn.seeds, drawn.positions))
    arm.call(
        "sample_rows",
        library.NativeLogitRows(given, size, size, which, count),
        library.NativeRowMasks(None, 0, None),
        library.NativeRowParameters(*map(arm.address, parts)),
        token_ids,
    )
    expected = NumpyRowSampler(count, size).sample(logits, rows, drawn)
    assert np.array_equal(token_ids, expected)
