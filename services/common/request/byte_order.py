"""Numbers in arrays, as they are written."""

import sys
from array import array


def little_endian(numbers: "array[int]") -> "array[int]":
    """The same array, whose bytes are then little-endian; on big-endian machines it is changed in
    place, and changed back by a second call.
    """
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
