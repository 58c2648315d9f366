"""How deep a chain of blocks is cached, by what each kind of attention reads of it."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from services.common.kv_cache_groups import AttentionType, KVCacheGroup

IsCached = Callable[[int], bool]
"""Whether the block at an index of the chain is cached in a group."""


def prefix_depth(
    groups: Sequence[KVCacheGroup], is_cached: Sequence[IsCached], num_blocks: int
) -> int:
    """Blocks of the longest prefix that every group can use; `is_cached` is parallel to `groups`.

    Each group in turn shortens it to the next one of its own, until all agree.
    """
    depth, num_agreeing = num_blocks, 0
    while num_agreeing < len(groups):
        num_agreeing = 0
        for group, cached in zip(groups, is_cached, strict=True):
            longest = _usable(group, cached, depth)
            num_agreeing += longest == depth
            depth = longest
    return depth


def _usable(group: KVCacheGroup, is_cached: IsCached, depth: int) -> int:
    """Blocks of the longest prefix, at most so many, of which one group has all that it reads.

    Full attention looks from the left, since most chains are cached nowhere; others from the right.
    """
    if group.attention_type is AttentionType.FULL:
        return sum(1 for _ in takewhile(is_cached, range(depth)))
    while depth:
        begin = group.first_seen_block(depth * group.block_size)
        missing = (at for at in range(depth - 1, begin - 1, -1) if not is_cached(at))
        gap = next(missing, None)
        if gap is None:
            break
        depth = gap
    return depth
