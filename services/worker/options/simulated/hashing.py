"""The numbers of the simulated model: 64-bit integers that wrap around.

`mix` is the last part of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators"). It maps different numbers to different, seemingly unrelated numbers.
"""

import numpy as np

from services.worker.backends.arrays import UInt64Array

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(numbers: UInt64Array) -> UInt64Array:
    mixed = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


def numbers_from(start: int, stop: int) -> UInt64Array:
    """The pseudorandom numbers with the indexes from `start` to `stop` - 1."""
    return mix(np.arange(start + 1, stop + 1, dtype=np.uint64) * _STEP)


class PositionFactors:
    """An odd factor for each position. A sum of numbers times these factors changes if two
    different numbers are exchanged.
    """

    def __init__(self) -> None:
        self._factors: UInt64Array = np.empty(0, np.uint64)

    def up_to(self, num_positions: int) -> UInt64Array:
        if len(self._factors) < num_positions:
            length = 1 << num_positions.bit_length()
            self._factors = numbers_from(0, length) | np.uint64(1)
        return self._factors
