"""Random prompts whose blocks are cached on several nodes. Every process draws the same prompts."""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.common.pool.packed_keys import KEY_BITS

NUM_NODES = 64
CHAIN_BLOCKS = 512
_SEED = 11


@dataclass(frozen=True, slots=True)
class Chain:
    """The keys of a prompt's blocks. `depths`: how many leading blocks each node has cached."""

    keys: Sequence[int]
    depths: dict[int, int]


def make_chains(num_blocks: int) -> Iterator[Chain]:
    """Yields chains of 512 blocks, about `num_blocks` in total. One node has all blocks of a chain,
    and up to five other nodes have the chain's first blocks. On average a block is cached on 1.4
    nodes.
    """
    rng = random.Random(_SEED)
    for _ in range(max(1, num_blocks // CHAIN_BLOCKS)):
        keys = array("Q", (rng.getrandbits(KEY_BITS) for _ in range(CHAIN_BLOCKS)))
        first, *others = rng.sample(range(NUM_NODES), rng.randint(1, 6))
        depths = {first: CHAIN_BLOCKS}
        depths |= {node: rng.randint(1, CHAIN_BLOCKS * 3 // 10) for node in others}
        yield Chain(keys, depths)
