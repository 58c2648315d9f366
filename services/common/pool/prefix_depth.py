"""How deep a chain of blocks is cached, by what each kind of attention reads of it."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, chain_block_size

IsCached = Callable[[int], bool]
"""Whether the block of a group that ends with the block at an index of the chain is cached."""


def prefix_depth(
    groups: Sequence[KVCacheGroup], is_cached: Sequence[IsCached], num_blocks: int
) -> int:
    """Blocks of the longest prefix that every group can use; `is_cached` is parallel to `groups`.
    A block of the chain has `chain_block_size` tokens, and a block of a group one or several times
    as many.

    Each group in turn shortens it to the next one of its own, until all agree.
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
    """Blocks of the longest prefix, up to `num_blocks`, of which a group has all blocks that it
    reads. `scale`: blocks of the chain in each.

    Full attention looks from the left, since most chains are cached nowhere; others from the right.
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
