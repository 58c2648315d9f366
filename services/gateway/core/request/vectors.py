"""Vectors of prompts: decoding and similarity."""

import math
from array import array
from collections.abc import Sequence
from operator import mul

from services.common.request.byte_order import little_endian


def numbers(values: bytes) -> "array[float]":
    """Decodes little-endian float32 numbers."""
    vector = array("f", values)
    little_endian(vector)  # type: ignore[arg-type]
    return vector


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the cosine of the angle between two vectors, or 0 for the zero vector."""
    product = sum(map(mul, first, second))
    squares = sum(map(mul, first, first)) * sum(map(mul, second, second))
    return product / math.sqrt(squares) if squares else 0.0
