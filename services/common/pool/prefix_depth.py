"""Computes the length of a block chain's cached prefix by the rules of each attention type."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, chain_block_size

IsCached = Callable[[int], bool]
"""Given the index of a block in the chain, returns whether the group has cached the group's block
that ends with this chain block.
"""


def prefix_depth(
    groups: Sequence[KVCacheGroup], is_cached: Sequence[IsCached], num_blocks: int
) -> int:
    """The number of chain blocks in the longest prefix that every group can use. `is_cached[i]`
    belongs to `groups[i]`. `num_blocks` is the number of blocks in the chain. A chain block has
    `chain_block_size` tokens, and a group's block has a multiple of this number. Each group in turn
    shortens the prefix to the group's longest hit, until no group shortens it further.
    """
    size = chain_block_size(groups)
    scales = [max(1, group.block_size // size) for group in groups]
    unit = math.lcm(*scales)
    depth, num_agreeing = num_blocks // unit * unit, 0
    while num_agreeing < len(groups):
        num_agreeing = 0
        for group, scale, cached in zip(groups, scales, is_cached, strict=True):
            longest = _usable(group, scale, cached, depth // scale) * scale // unit * unit
            num_agreeing += longest == depth
            depth = longest
    return depth


def _usable(group: KVCacheGroup, scale: int, is_cached: IsCached, num_blocks: int) -> int:
    """Number of the group's blocks, at most `num_blocks`, in the longest prefix that the group can
    use. `scale` is the number of chain blocks per group block. Full attention searches from the
    left, since most chains are not cached at all. Other types search from the right.
    """
    ends = range(scale - 1, num_blocks * scale, scale)
    if group.attention_type is AttentionType.FULL:
        return sum(1 for _ in takewhile(is_cached, ends))
    while num_blocks:
        begin = group.first_seen_block(num_blocks * group.block_size)
        missing = (at for at in range(num_blocks - 1, begin - 1, -1) if not is_cached(ends[at]))
        gap = next(missing, None)
        if gap is None:
            break
        num_blocks = gap
    return num_blocks
