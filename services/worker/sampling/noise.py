"""The layout of a race's exponentials over a vocabulary, and the hash that they are made with.

A race draws a token by giving each token an exponential of its own; see race.py. The constants here
are common to the host's implementation (race.py) and the device's (backends/cuda/race.py).

Exponentials have no memory: of 32 of them the smallest is an exponential divided by 32, each of
the 32 is it equally often, and the differences of the others to it are exponentials again. So they
are made in blocks of 32: one word of the hash gives the smallest of a block and the token that has
it, and words for the other tokens are made only if the block can hold the winner of the race. (As
in top-down sampling of Gumbels: Maddison, Tarlow, Minka, "A* Sampling", NIPS 2014.)

A token id is composed of superblock, offset and lane: a superblock holds 128 blocks, one for each
lane, so that the largest logit of each block is found in passes over 128 consecutive ids.

The words are those of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014): word i of a state is a mix of state + i * GAMMA. The states are words of
Philox, one for blocks and one for tokens at each (seed, position).
"""

BLOCK_SIZE = 32
NUM_LANES = 128
SUPERBLOCK_SIZE = BLOCK_SIZE * NUM_LANES

GAMMA = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Pairs of a shift and a factor: a word is xored with itself shifted right, then multiplied."""
LAST_SHIFT = 31

NUMBER_SHIFT = 12
"""The 52 bits above are n of the number (n + 1/2) * NUMBER_UNIT, which is above 0 and below 1. The
lowest of the bits below are the offset of a block's smallest exponential.
"""
NUMBER_UNIT = 2.0**-52
