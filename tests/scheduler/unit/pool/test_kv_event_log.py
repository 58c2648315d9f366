"""The log of KV events: how many batches it keeps, and the order of the blocks in a snapshot."""

import pytest

from services.common.pool.block_hash import BlockHash, pack_token_ids
from services.scheduler.adapters.pool.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheNamespace,
)
from services.scheduler.adapters.pool.kv_events.log import KVEventLog, Trimmed


def h(name: str) -> BlockHash:
    return BlockHash(name.encode() * 32)


def stored(names: str, parent: str | None = None, group: int = 0) -> BlockStored:
    """An event for blocks that are named by letters. Each has one token, the letter's number."""
    tokens = pack_token_ids([ord(name) - ord("a") for name in names])
    return BlockStored(
        tuple(map(h, names)), None if parent is None else h(parent), tokens, group, CacheNamespace()
    )


def removed(names: str, group: int = 0) -> BlockRemoved:
    return BlockRemoved(tuple(map(h, names)), group)


def test_a_snapshot_lists_runs_of_blocks() -> None:
    log = KVEventLog(10)
    log.append((stored("abc"), stored("x", "b")))
    log.append((stored("d", "c"),))
    assert log.snapshot() == [stored("abc"), stored("x", "b"), stored("d", "c")]


def test_a_part_of_a_block_is_listed_apart_from_whole_ones() -> None:
    log = KVEventLog(10)
    whole = BlockStored((h("b"),), None, pack_token_ids([0, 1]), 0, CacheNamespace())
    log.append((whole, stored("c", "b")))
    assert log.snapshot() == [whole, stored("c", "b")]
    assert [event.block_size for event in log.snapshot()] == [2, 1]


def test_a_parent_that_was_stored_again_later_is_listed_before_its_children() -> None:
    log = KVEventLog(10)
    log.append((stored("abc"),))
    log.append((removed("ab"),))
    assert log.snapshot() == [stored("c", "b")]
    log.append((stored("ab"),))
    assert log.snapshot() == [stored("abc")]


def test_a_block_is_removed_from_its_own_group_alone() -> None:
    log = KVEventLog(10)
    log.append((stored("ab"), stored("ab", group=1), removed("a", group=1)))
    assert log.snapshot() == [stored("ab"), stored("b", "a", group=1)]


def test_nothing_is_stored_after_all_blocks_are_cleared() -> None:
    log = KVEventLog(10)
    log.append((stored("ab"), AllBlocksCleared()))
    assert log.snapshot() == []


async def test_the_newest_batches_are_kept() -> None:
    log = KVEventLog(2, lambda: 5.0)
    assert (log.oldest, log.newest) == (0, -1)
    for name in "abc":
        log.append((stored(name),))
    assert (log.oldest, log.newest) == (1, 2)
    assert [batch.events for batch in log.batches(1)] == [(stored("b"),), (stored("c"),)]
    assert log.batches(3) == []
    for number in (0, 4):
        with pytest.raises(Trimmed):
            log.batches(number)
    assert [batch.sequence for batch in await log.after(1)] == [2]


def test_fewer_batches_are_kept_if_they_are_about_many_blocks() -> None:
    log = KVEventLog(10, max_blocks=5)
    log.append((AllBlocksCleared(),))
    for names in ("ab", "cd", "ef"):
        log.append((stored(names),))
    assert (log.oldest, log.newest) == (2, 3)
    log.append((stored("ghijkl"),))
    assert log.batches(5) == []
    assert len(log.snapshot()) == 4
