"""The byte order of numbers in arrays that are stored or sent."""

import sys
from array import array


def little_endian(numbers: "array[int]") -> "array[int]":
    """Returns the array with little-endian bytes."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
