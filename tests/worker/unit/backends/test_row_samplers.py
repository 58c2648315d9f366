"""Compiled draws of tokens equal NumPy's bit for bit, with AVX-512 and with AVX2. The code for the
other kinds of x86 processors is the code for AVX-512.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.backends.native.prebuilt import X86_KINDS
from services.worker.backends.native.row_sampler import NativeRowSampler
from services.worker.backends.row_sampler import REFUSED, UNUSABLE, RowMasks, RowParameters
from services.worker.sampling.filters import NUM_ROW_VALUES
from services.worker.sampling.numpy_row_sampler import NumpyRowSampler
from tests.worker.programs import compiled_program

KINDS = [kind for kind in X86_KINDS if kind.name in {"avx512", "avx2"}]


@pytest.fixture(scope="module", params=KINDS, ids=[kind.name for kind in KINDS])
def native(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeRowSampler:
    """The compiled sampler for a kind of processor. Skips the test if it cannot be built."""
    kind = request.param
    program, scratch = '#include "sampling.cpp"', tmp_path_factory.mktemp(kind.name)
    return NativeRowSampler(compiled_program(program, scratch, kind.flags, kind.features))


def parameters_of(rows: list[tuple[float, int, float, float]], seed: int) -> RowParameters:
    values = np.array(rows, np.float64).T.copy()
    values[0] = values[0].astype(np.float32)
    generator = np.random.default_rng(seed)
    count = len(rows)
    seeds = generator.integers(2**64, size=count, dtype=np.uint64)
    return RowParameters(values, seeds, generator.integers(2**40, size=count))


def assert_equal(
    native: NativeRowSampler,
    logits: np.ndarray,
    parameters: RowParameters,
    masks: RowMasks | None = None,
) -> np.ndarray:
    """Draws the rows of `logits` in another order, first all at once and then the last one alone.
    Compares compiled draws with NumPy's. Returns the draws.
    """
    rows = np.arange(len(logits))[::-1].copy()
    expected = NumpyRowSampler(len(rows), logits.shape[1]).sample(logits, rows, parameters, masks)
    found = native.sample(logits, rows, parameters, masks)
    np.testing.assert_array_equal(found, expected)
    last = np.array([len(rows) - 1])
    of_last = None if masks is None else masks.of(last)
    alone = native.sample(logits, rows[last], parameters.of(last), of_last)
    assert alone.tolist() == expected[last].tolist()
    return expected


def drawn_masks(kinds: list[str], generator: np.random.Generator, size: int) -> RowMasks:
    """Random masks. A row's kind determines whether the row has no mask, or a mask that allows all
    tokens, a few, about half, or no token.
    """
    fractions = {"all": 1.0, "few": 0.01, "half": 0.5, "none": 0.0}
    allowed = np.zeros((len(kinds), -(-size // 32) * 32), np.bool_)
    rows = generator.permutation(len(kinds))
    for row, kind in zip(rows, kinds, strict=True):
        allowed[row] = generator.random(allowed.shape[1]) < fractions.get(kind, 1.0)
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    is_masked = np.array([kind in fractions for kind in kinds])
    return RowMasks(words, np.where(is_masked, rows, -1))


KIND_OF_LOGITS = st.sampled_from(
    ["normal", "peaked", "equal", "levels", "huge", "tiny", "banned", "geometric", "signed zeros"]
)
SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, -0.0])
ROW = st.tuples(
    st.sampled_from([0.0, 1.0, 1.0, 0.7, 0.01, 1e-30, 50.0, 3e38]),
    st.sampled_from([0, 0, 1, 2, 40, 127, 1000, 2**31 - 1]),
    st.sampled_from([1.0, 1.0, 0.9, 0.999, 0.5, 0.1, 1e-30, 1 - 2**-53]),
    st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0, 1e-9, 1e-40]),
)


def drawn_logits(kind: str, generator: np.random.Generator, size: int) -> np.ndarray:
    normal = generator.standard_normal(size)
    made = {
        "normal": normal * 2,
        "peaked": normal * 12,
        "equal": np.zeros(size),
        "levels": np.round(normal * 2),
        "huge": np.clip(normal * 1e38, -3e38, 3e38),
        "tiny": normal * 1e-42,
        "banned": np.where(generator.random(size) < 0.95, -np.inf, normal),
        "geometric": np.exp2(-generator.integers(0, 140, size).astype(float)),
        "signed zeros": np.where(generator.random(size) < 0.5, -0.0, 0.0),
    }
    return made[kind].astype(np.float32)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 17, 127, 129, 2000, 4096, 4099, 9001]),
    rows=st.lists(st.tuples(KIND_OF_LOGITS, ROW), min_size=1, max_size=6),
    special=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9000), SPECIAL), max_size=3),
)
def test_compiled_draws_equal_numpys(
    native: NativeRowSampler,
    seed: int,
    size: int,
    rows: list[tuple[str, tuple[float, int, float, float]]],
    special: list[tuple[int, int, float]],
) -> None:
    generator = np.random.default_rng(seed)
    logits = np.stack([drawn_logits(kind, generator, size) for kind, _ in rows])
    for row, token_id, value in special:
        logits[row % len(rows), token_id % size] = value
    assert_equal(native, logits, parameters_of([row for _, row in rows], seed))


@pytest.mark.parametrize("size", [49_152, 128_256])
def test_compiled_draws_from_large_vocabularies_equal_numpys(
    native: NativeRowSampler, size: int
) -> None:
    """There are so many rows that several threads draw."""
    generator = np.random.default_rng(size)
    kinds = [
        (temperature, *filters)
        for temperature in (0.0, 0.6, 1.0, 2.5)
        for filters in (
            (0, 1.0, 0.0),
            (50, 1.0, 0.0),
            (0, 0.95, 0.0),
            (0, 1.0, 0.1),
            (9, 0.8, 0.01),
        )
    ]
    spreads = np.linspace(0.1, 12, len(kinds))[:, None]
    logits = (generator.standard_normal((len(kinds), size)) * spreads).astype(np.float32)
    for number_of_threads in (1, 3):
        torch.set_num_threads(number_of_threads)
        assert_equal(native, logits, parameters_of(kinds, size))
    torch.set_num_threads(2)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 31, 33, 127, 4096, 4099, 9001]),
    rows=st.lists(
        st.tuples(
            KIND_OF_LOGITS, ROW, st.sampled_from(["no mask", "all", "few", "few", "half", "none"])
        ),
        min_size=1,
        max_size=6,
    ),
    special=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9000), SPECIAL), max_size=2),
)
def test_masked_draws_are_those_from_rows_without_the_banned_tokens(
    native: NativeRowSampler,
    seed: int,
    size: int,
    rows: list[tuple[str, tuple[float, int, float, float], str]],
    special: list[tuple[int, int, float]],
) -> None:
    generator = np.random.default_rng(seed)
    logits = np.stack([drawn_logits(kind, generator, size) for kind, _, _ in rows])
    for row, token_id, value in special:
        logits[row % len(rows), token_id % size] = value
    masks = drawn_masks([mask for _, _, mask in rows], generator, size)
    parameters = parameters_of([row for _, row, _ in rows], seed)
    drawn = assert_equal(native, logits, parameters, masks)
    order = np.arange(len(rows))[::-1].copy()
    bits = np.unpackbits(masks.words.view(np.uint8), axis=1, count=size, bitorder="little")
    banned = np.where((masks.rows >= 0)[:, None], bits[masks.rows] == 0, False)
    unmasked = native.sample(logits, order, parameters)
    left = np.where(banned, -np.inf, logits[order])
    expected = native.sample(left, np.arange(len(rows)), parameters)
    expected[(expected == UNUSABLE) & banned.any(axis=1)] = REFUSED
    expected[unmasked == UNUSABLE] = UNUSABLE
    np.testing.assert_array_equal(drawn, expected)


def test_rows_without_a_distribution_are_reported_and_change_no_other_row(
    native: NativeRowSampler,
) -> None:
    generator = np.random.default_rng(4)
    logits = generator.standard_normal((6, 5000)).astype(np.float32)
    parameters = parameters_of([(1.0, 0, 0.9, 0.0)] * 6, 4)
    clean = assert_equal(native, logits, parameters)
    logits[1, 4999], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    drawn = assert_equal(native, logits, parameters)
    assert (drawn[::-1][1:4] == UNUSABLE).all()
    assert (drawn == clean)[::-1].tolist() == [True, False, False, False, True, True]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 31, 32, 33, 100, 4136]),
    values=st.lists(SPECIAL, max_size=2),
)
def test_masked_copies_equal_numpys(
    native: NativeRowSampler, seed: int, size: int, values: list[float]
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((4, size)).astype(np.float32)
    for value in values:
        logits[generator.integers(4), generator.integers(size)] = value
    words = generator.integers(-(2**31), 2**31, (4, -(-size // 32)), dtype=np.int64)
    masks = RowMasks(words.astype(np.int32), np.array([-1, 1, 2, 3]))
    rows = np.array([3, 0, 2, 2])
    found, expected = np.empty((2, 4, size), np.float32)
    usable = native.copy(logits, rows, masks, found)
    np.testing.assert_array_equal(
        usable, NumpyRowSampler(4, size).copy(logits, rows, masks, expected)
    )
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
    bits = np.unpackbits(masks.words[1].view(np.uint8), bitorder="little")[:size]
    np.testing.assert_array_equal(found[1] == -np.inf, (bits == 0) | (logits[0] == -np.inf))


@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.75, 0.0), (0, 1.0, 0.3)])
def test_tokens_come_as_often_as_their_probabilities_say(
    native: NativeRowSampler, filters: tuple[int, float, float]
) -> None:
    """Each filter allows the same three tokens. Tests their frequencies."""
    probabilities = np.array([0.1, 0.4, 0.05, 0.25, 0.15, 0.05])
    kept = [1, 3, 4] if filters != (0, 1.0, 0.0) else list(range(6))
    count = 20_000
    row = np.log(probabilities).astype(np.float32)
    logits = np.broadcast_to(row, (count, 6))
    values = np.array([(1.0, *filters)] * count).T.copy()
    parameters = RowParameters(values, np.full(count, 7, np.uint64), np.arange(count))
    found = native.sample(logits, np.arange(count), parameters)
    expected = count * probabilities[kept] / probabilities[kept].sum()
    counts = np.bincount(found, minlength=6)
    assert counts[kept].sum() == count
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 35.9  # with 5 degrees of freedom, exceeded by chance once in a million


def test_a_value_that_compiled_code_does_not_read_is_refused(native: NativeRowSampler) -> None:
    parameters = parameters_of([(1.0, 0, 1.0, 0.0)], seed=1)
    more = replace(parameters, values=np.zeros((NUM_ROW_VALUES + 1, 1)))
    with pytest.raises(ValueError, match="a row has 5 values, but compiled code reads 4"):
        native.sample(np.zeros((1, 8), np.float32), np.zeros(1, np.int64), more)
