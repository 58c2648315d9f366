"""Random words as a function of a request's seed and a token's position, without state.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
ten rounds of multiplications map a 128-bit counter and a 64-bit key to 128 random bits. Words are
computed independently of each other. So ranks draw the same tokens without exchanging words, and a
request draws the same tokens after a preemption.
"""

import numpy as np

from services.worker.backends.arrays import Int64Array, UInt32Array, UInt64Array

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

SAMPLING_STREAM = 0
"""The `stream` (see `random_states`) for drawing tokens."""


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Maps counters [n, 4] and keys [n, 2] to random words [n, 4]."""
    even, odd = counter.T[::2].astype(np.uint64), counter.T[1::2].astype(np.uint64)
    key_words = key.T.astype(np.uint64)
    for round_ in range(_ROUNDS):
        product = _MULTIPLIERS * even
        round_key = (key_words + np.uint64(round_) * _WEYL) & _LOW
        even = (product >> _WORD)[::-1] ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=1).astype(np.uint32)


def random_states(seeds: UInt64Array, positions: Int64Array, stream: int) -> UInt64Array:
    """Two random words for each (seed, position), [n, 2].

    The position is the token's index in its whole sequence. Each purpose for which random numbers
    are needed at a position has its own `stream`. Streams are independent.
    """
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, :2] = _words(positions.astype(np.uint64))
    counter[:, 2] = stream
    random = philox4x32(counter, _words(seeds)).astype(np.uint64)
    return (random[:, 1::2] << _WORD) | random[:, ::2]


def _words(values: UInt64Array) -> UInt32Array:
    return np.stack((values & _LOW, values >> _WORD), axis=1).astype(np.uint32)
