"""The byte order of numbers in arrays that are stored or sent."""

import sys
from array import array


def little_endian(numbers: "array[int]") -> "array[int]":
    """Returns the same array with little-endian bytes. On big-endian machines the bytes are swapped
    in place, and a second call swaps them back.
    """
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
