"""How the exponentials of a race are laid out over a vocabulary, and the hash that makes them.

A race draws a token by giving each token an exponential of its own; see race.py. This module holds
what the host's implementation (race.py) and the device's (device_race.py) have in common.

Exponentials have no memory: of 32 of them the smallest is an exponential divided by 32, each of
the 32 is it equally often, and what the others exceed it by are exponentials again. So they are
made in blocks of 32: one word of the hash gives the smallest of a block and says which token has
it, and the other tokens need words of their own only where the block can hold the winner of the
race. (As in top-down sampling of Gumbels: Maddison, Tarlow, Minka, "A* Sampling", NIPS 2014.)

A token id is composed of superblock, place and lane: a superblock holds 128 blocks, one for each
lane, so that the largest logit of each block is found in passes over 128 neighbouring ids at once.

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
"""The 52 bits above are the number that a word stands for: n + 1/2 units, never 0 and never 1. Of
the bits below, the lowest give the place of a block's smallest exponential.
"""
NUMBER_UNIT = 2.0**-52
