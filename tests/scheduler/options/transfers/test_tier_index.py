"""The scheduler's index of the host-memory tier for offloaded KV blocks: which blocks are replaced,
in examples and compared with a naive index.
"""

import random

from services.common.pool.block_hash import BlockHash
from services.scheduler.core.kv_transfer import TierBlockId
from services.scheduler.options.transfers.core.tier_index import TierIndex, tier_key


def key(number: int) -> bytes:
    return tier_key(BlockHash(number.to_bytes(32, "big")), 0)


def test_the_key_has_the_hash_and_the_group() -> None:
    assert tier_key(BlockHash(bytes(32)), 258) == bytes(34) + b"\x01\x02"


def test_the_block_that_was_not_used_for_longest_is_replaced() -> None:
    index = TierIndex(2)
    first = index.put(key(1))
    index.put(key(2))
    index.touch(key(1))
    index.put(key(3))
    assert [key(number) in index for number in (1, 2, 3)] == [True, False, True]
    assert index.num_evictions == 1
    assert index.pin(key(1)) == first


def test_a_block_that_is_loaded_is_not_replaced() -> None:
    index = TierIndex(1)
    block = index.put(key(1))
    assert index.pin(key(1)) == block
    assert index.put(key(2)) is None
    assert block is not None
    index.unpin(block)
    assert index.put(key(2)) == block


def test_a_block_found_damaged_is_free_when_its_loads_have_ended() -> None:
    index = TierIndex(1)
    block = index.put(key(1))
    assert block is not None
    index.pin(key(1))
    index.discard(key(1), block)
    assert index.put(key(2)) is None
    index.unpin(block)
    assert index.put(key(2)) == block
    index.discard(key(1), block)
    assert key(2) in index, "the block holds something else now"


def test_it_equals_a_list_in_order_of_use() -> None:
    draw = random.Random(3)
    for _ in range(200):
        index, size = TierIndex(draw.randrange(1, 6)), 0
        order: list[bytes] = []
        pins: list[tuple[bytes, TierBlockId]] = []
        size = index.num_blocks
        for _ in range(100):
            number = key(draw.randrange(8))
            match draw.randrange(4):
                case 0 if number not in order:
                    pinned = {pinned for pinned, _ in pins}
                    if len(order) == size:
                        loose = [known for known in order if known not in pinned]
                        order = [known for known in order if known != next(iter(loose), None)]
                    fits = index.put(number) is not None
                    assert fits == (len(order) < size)
                    order += [number] if fits else []
                case 1 if number in order:
                    pins.append((number, index.pin(number)))
                    order = [known for known in order if known != number] + [number]
                case 2 if pins:
                    _, block = pins.pop(draw.randrange(len(pins)))
                    index.unpin(block)
                case 3 if number in order:
                    index.touch(number)
                    order = [known for known in order if known != number] + [number]
            index.check()
            assert [number in index for number in order] == [True] * len(index)
