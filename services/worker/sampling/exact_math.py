"""Exponentials and logarithms with the same bits on every processor.

NumPy's own functions depend on the processor's instructions. The functions here use only operations
that IEEE 754 rounds correctly, in a fixed order. Therefore seeded outputs do not depend on the
machine, and backends/native/cpp/exact_math.h returns the same results.
"""

import numpy as np

from services.worker.backends.arrays import Float32Array, Float64Array

_LOG2_OF_E = np.float32(1.44269504)
_ROUNDER = np.float32(1.5 * 2**23)
"""From 2**23 on, float32 has no fraction bits. Adding this constant to a small number rounds the
number to an integer, which is then in the lowest bits of the sum.
"""
_LN2_HIGH32, _LN2_LOW32 = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST = np.float32(-87)
_INVERSE_FACTORIALS = tuple(np.float32(1) / np.float32(n) for n in (720, 120, 24, 6, 2, 1, 1))

_ONE, _ROOT_OF_HALF = 0x3FF0000000000000, 0x3FE6A09E667F3BCD
_MANTISSA_BITS, _EXPONENT_BIAS = 52, 1023
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
_LAST_ODD = 21


def exponential(x: Float32Array) -> Float32Array:
    """e^x for x up to 0, within 3 units in the last place. The result is 0 for x below -87.

    Cody and Waite's reduction: x / ln 2 is split into an integer and a remainder of at most one
    half. A polynomial approximates the exponential of the remainder.
    """
    clamped = np.maximum(x, _LEAST)
    shifted = clamped * _LOG2_OF_E + _ROUNDER
    whole = shifted - _ROUNDER
    rest = clamped - whole * _LN2_HIGH32 - whole * _LN2_LOW32
    series: Float32Array = rest * _INVERSE_FACTORIALS[0] + _INVERSE_FACTORIALS[1]
    for coefficient in _INVERSE_FACTORIALS[2:]:
        series *= rest
        series += coefficient
    power = (shifted.view(np.int32) - _ROUNDER.view(np.int32) + np.int32(127)) << np.int32(23)
    series *= power.view(np.float32)
    series[x < _LEAST] = 0
    return series


def logarithm(x: Float64Array) -> Float64Array:
    """The natural logarithm of normal numbers above 0, within 2 units in the last place.

    The mantissa m is between the square roots of 1/2 and 2. Its logarithm is twice the inverse
    hyperbolic tangent of (m - 1) / (m + 1), a series of odd powers.
    """
    bits = x.view(np.uint64)
    biased = (bits + np.uint64(_ONE - _ROOT_OF_HALF)) >> np.uint64(_MANTISSA_BITS)
    exponent = biased.astype(np.float64) - _EXPONENT_BIAS
    mantissa_bits = bits - ((biased - np.uint64(_EXPONENT_BIAS)) << np.uint64(_MANTISSA_BITS))
    over = mantissa_bits.view(np.float64) - 1.0
    ratio = over / (over + 2.0)
    square = ratio * ratio
    series = square * (2.0 / _LAST_ODD)
    for odd in range(_LAST_ODD - 2, 1, -2):
        series += 2.0 / odd
        series *= square
    of_mantissa = ratio * 2.0 + ratio * series
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + of_mantissa)
