"""The byte order of numbers in arrays that are stored or sent."""

import sys
from array import array


def little_endian(numbers: "array[int]") -> "array[int]":
    """Returns the array with little-endian bytes. Big-endian machines swap the bytes in place."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
