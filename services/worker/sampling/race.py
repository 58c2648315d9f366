"""Draws a token by a race: each token has a random time, and the token with the smallest time is
drawn.

A token's time is an exponential random number divided by the token's weight, so each token is drawn
with its probability. (This is the Gumbel-max trick: the negative logarithm of a time is logit /
temperature plus a Gumbel number.) The random number is a function of (seed, position, token id),
and does not depend on other tokens. Therefore a rounding error of a logit changes the draw only if
the two smallest times differ by no more than the error. Two models with similar probabilities, such
as a draft model and its target, mostly draw the same tokens.

Exponential numbers are generated in blocks of 32, for 32 tokens. The smallest of 32 exponentials is
an exponential divided by 32, and each of the 32 is equally likely to be the smallest. The
differences between the other 31 and the smallest are exponentials again, because exponentials are
memoryless. Therefore one random word gives the smallest exponential of a block and the token that
has it. Words for the other tokens are computed only if the drawn token may be in the block. (As in
top-down sampling of Gumbels: Maddison, Tarlow, Minka, "A* Sampling", NIPS 2014.)

The 32 tokens of a block have ids 128 apart. A superblock is 128 interleaved blocks, with 32 * 128
consecutive ids. A token's lane is its block's number in the superblock, and its offset is its
number in the block. Each pass over 128 consecutive logits updates the largest logits of these 128
blocks.

The random words are generated with SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014): word i of a state is a mix of state + i * GAMMA. The states are
random words from Philox (philox.py). Each (seed, position) has one state for blocks and one for
tokens.
"""

import numpy as np

from services.worker.backends.arrays import Float32Array, Float64Array, Int64Array, UInt64Array
from services.worker.sampling.exact_math import logarithm

BLOCK_SIZE = 32
NUM_LANES = 128
SUPERBLOCK_SIZE = BLOCK_SIZE * NUM_LANES

GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Pairs of a shift and a factor: a word is xored with itself shifted right, then multiplied."""
LAST_SHIFT = 31

NUMBER_SHIFT = 12
"""The number of low bits of a word that are dropped. The other 52 bits are an integer n, which
gives a number between 0 and 1: (n + 1/2) * NUMBER_UNIT. The lowest five bits of a block's word are
the offset of the token that has the block's smallest exponential.
"""
NUMBER_UNIT = 2.0**-52

_LOGITS_BYTES = 2**21
_NUM_FIRST_BLOCKS = 24
_BOUND_ERROR = 1e-9
"""An upper limit of the rounding error of a block's bound (see Race)."""
_LEAST_WEIGHT = np.float32(-1e6)
"""Lower limit of the logarithm of a weight. It keeps the speeds of banned tokens finite and
distinct, because selecting among many equal values is slow. It changes no draw, because
exponentials are between 2**-58 and 38, so that a token whose logarithm is below -46 cannot be
drawn.
"""


def words(states: UInt64Array, indexes: UInt64Array) -> UInt64Array:
    mixed = states + indexes * np.uint64(GAMMA)
    for shift, factor in MIX:
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(LAST_SHIFT)
    return mixed


def exponentials(random: UInt64Array) -> Float64Array:
    """Maps random words to exponential random numbers, finite and above 0."""
    numbers = (random >> np.uint64(NUMBER_SHIFT)).astype(np.float64)
    numbers += 0.5
    numbers *= NUMBER_UNIT
    return -logarithm(numbers)


class Race:
    """Draws tokens for up to `capacity` rows of logits at a time.

    The logits of a row are written to `next_row`, and `enter` adds the row. `run` draws a token for
    each row and removes all rows. A token's speed is the negative logarithm of its time.

      1. No token of a block is faster than the block's bound: the speed that its largest logit
         would have with its smallest exponential.
      2. The exponentials of all tokens in the blocks with the highest bounds are computed, and the
         fastest of these tokens is found.
      3. In each further block whose bound is not below the speed of this token, all exponentials
         are computed too.

    For any distribution, at most 32 blocks on average reach the third step, and mostly no block
    does. The result is the same as in a race of all tokens. backends/native/cpp/token_race.h skips
    other blocks and draws the same tokens.
    """

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        width = -(-vocab_size // SUPERBLOCK_SIZE) * SUPERBLOCK_SIZE
        self.capacity = max(1, min(max_num_rows, _LOGITS_BYTES // (4 * width)))
        self._num_rows = 0
        self._vocab_size = vocab_size
        self._logits = np.full((self.capacity, width), -np.inf, dtype=np.float32)
        self._largest = np.empty((self.capacity, 1), dtype=np.float32)
        self._temperatures = np.empty((self.capacity, 1), dtype=np.float32)
        self._states = np.empty((2, self.capacity, 1), dtype=np.uint64)
        self._rows = np.arange(self.capacity)[:, None]
        self._block_indexes = np.arange(width // BLOCK_SIZE, dtype=np.uint64)
        by_offset = np.arange(width).reshape(-1, BLOCK_SIZE, NUM_LANES).swapaxes(1, 2)
        self._token_ids = by_offset.reshape(-1, BLOCK_SIZE)

    @property
    def next_row(self) -> Float32Array:
        """Memory for the logits of the next row, [V]. Minus infinity bans a token."""
        return self._logits[self._num_rows, : self._vocab_size]

    def clear(self) -> None:
        self._num_rows = 0

    def enter(self, largest: np.float32, temperature: np.float32, states: UInt64Array) -> None:
        """Adds the row in `next_row`. `largest`: its largest logit, finite. `temperature`: above 0.
        `states` [2]: the random states for blocks and for tokens.
        """
        row = self._num_rows
        self._largest[row] = largest
        self._temperatures[row] = temperature
        self._states[:, row, 0] = states
        self._num_rows += 1

    def run(self) -> Int64Array:
        """Returns a token for each row, in the order in which rows were added. There must be at
        least one row. Among equally fast tokens, the lowest id wins.
        """
        count = self._num_rows
        self.clear()
        rows, logits = self._rows[:count], self._logits[:count]
        best = logits.reshape(count, -1, BLOCK_SIZE, NUM_LANES).max(axis=2).reshape(count, -1)
        random = words(self._states[0, :count], self._block_indexes)
        smallest = exponentials(random)
        smallest /= BLOCK_SIZE
        bounds = self._speeds(rows, best[:, :, None], smallest[:, :, None])[:, :, 0]
        first = bounds.argpartition(-_NUM_FIRST_BLOCKS, axis=1)[:, -_NUM_FIRST_BLOCKS:]
        speeds, token_ids = self._fastest(rows, first, random, smallest)
        bounds[rows, first] = -np.inf
        further = bounds >= speeds[:, None] - _BOUND_ERROR
        for row in np.flatnonzero(further.any(axis=1)).tolist():
            blocks = np.flatnonzero(further[row])[None]
            ((speed,), (token_id,)) = self._fastest(rows[row, None], blocks, random, smallest)
            if (-speed, token_id) < (-speeds[row], token_ids[row]):
                token_ids[row] = token_id
        return token_ids

    def _fastest(
        self, rows: Int64Array, blocks: Int64Array, random: UInt64Array, smallest: Float64Array
    ) -> tuple[Float64Array, Int64Array]:
        """Returns, for each row [r, 1], the speed and id of the fastest token in the row's blocks
        [r, b]. `random` and `smallest` are the random words and smallest exponentials of all
        blocks.
        """
        token_ids = self._token_ids[blocks]
        offsets = (random[rows, blocks] & np.uint64(BLOCK_SIZE - 1)).astype(np.int64)
        times = exponentials(words(self._states[1, rows], token_ids.astype(np.uint64)))
        times[self._rows[: len(rows)], np.arange(blocks.shape[1]), offsets] = 0
        times += smallest[rows, blocks][:, :, None]
        speeds = self._speeds(rows, self._logits[rows[:, :, None], token_ids], times)
        fastest = speeds.max(axis=(1, 2))
        ids = np.where(speeds == fastest[:, None, None], token_ids, self._vocab_size)
        return fastest, ids.min(axis=(1, 2))

    def _speeds(
        self, rows: Int64Array, logits: Float32Array, exponentials: Float64Array
    ) -> Float64Array:
        weights = logits - self._largest[rows]
        weights /= self._temperatures[rows]
        np.maximum(weights, _LEAST_WEIGHT, out=weights)
        speeds = -logarithm(exponentials)
        speeds += weights
        return speeds
