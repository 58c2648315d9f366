"""The tests that every implementation of the port Directory must pass.

A Directory finds the pools that have cached the beginning of a prompt. The tests of an
implementation subclass `DirectoryConformance` and create the directory in a fixture. A directory
may lag behind the published events, so the tests wait for the expected answer until a deadline.
"""

import asyncio

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import PoolId
from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.kvpool.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch
from services.kvpool.core.pool_config import PoolConfig
from services.kvpool.core.ports import Directory
from tests.kvpool.worked_examples import BLOCK_SIZE, hashes

SECONDS = 60.0
FINGERPRINT = b"m" * 32

FULL = KVCacheGroup(AttentionType.FULL, BLOCK_SIZE)
WINDOW = KVCacheGroup(AttentionType.SLIDING_WINDOW, BLOCK_SIZE, 6)  # a query sees six tokens
CHUNK = KVCacheGroup(AttentionType.CHUNKED_LOCAL, BLOCK_SIZE, 8)  # a chunk is two blocks
STATE = KVCacheGroup(AttentionType.STATE_SPACE, BLOCK_SIZE, mamba_cache_mode=MambaCacheMode.ALIGN)


def stored(path: str, group: int = 0) -> BlocksStored:
    return BlocksStored(group, tuple(hashes(path)))


def opened(directory: Directory, pool_id: str, generation: int, *groups: KVCacheGroup) -> None:
    config = PoolConfig(100, groups, fingerprint=FINGERPRINT, node=pool_id)
    directory.open(PoolId(pool_id), generation, config)


def removed(*gone: BlockHash, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(group, gone)


async def says(directory: Directory, path: str, *expected: tuple[str, int, int]) -> None:
    """Waits until a prompt's matches are the expected ones: (pool, generation, blocks)."""
    answer: list[tuple[str, int, int]] = []
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                matches = await directory.match(hashes(path))
                answer = [(match.pool_id, match.generation, match.num_blocks) for match in matches]
                if answer == list(expected):
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{path}: {answer} is not {list(expected)}") from None


class DirectoryConformance:
    """The tests of a directory. They need a fixture `directory`."""

    async def test_nothing_is_found_in_an_empty_pool(self, directory: Directory) -> None:
        opened(directory, "p", 1, FULL)
        await says(directory, "abc")

    async def test_a_chain_is_as_deep_as_its_first_missing_block(
        self, directory: Directory
    ) -> None:
        opened(directory, "p", 1, FULL)
        directory.publish("p", EventBatch(1, 1, False, (stored("abc"),)))
        await says(directory, "abc", ("p", 1, 3))
        await says(directory, "abx", ("p", 1, 2))
        await says(directory, "x")
        # Pools evict the tail of a chain first, so no block remains after its parent is evicted.
        directory.publish("p", EventBatch(1, 2, False, (removed(*hashes("abc")[1:]),)))
        await says(directory, "abc", ("p", 1, 1))

    async def test_events_apply_in_order(self, directory: Directory) -> None:
        opened(directory, "p", 1, FULL)
        (a,) = hashes("a")
        batch = EventBatch(1, 1, False, (stored("a"), removed(a), stored("ab"), removed(a)))
        directory.publish("p", batch)
        directory.publish("p", EventBatch(1, 2, False, (stored("x"),)))
        await says(directory, "x", ("p", 1, 1))
        await says(directory, "ab")

    async def test_every_group_must_hold_a_block(self, directory: Directory) -> None:
        opened(directory, "p", 1, FULL, FULL)
        directory.publish("p", EventBatch(1, 1, False, (stored("abc"),)))
        directory.publish("p", EventBatch(1, 2, False, (stored("ab", group=1),)))
        await says(directory, "abc", ("p", 1, 2))
        directory.publish("p", EventBatch(1, 3, False, (removed(hashes("a")[0], group=1),)))
        await says(directory, "abc")

    async def test_of_a_window_only_the_last_blocks_need_be_cached(
        self, directory: Directory
    ) -> None:
        opened(directory, "p", 1, WINDOW)
        a, ab, abc, abcd = hashes("abcd")
        directory.publish("p", EventBatch(1, 1, False, (BlocksStored(0, (abc, abcd)),)))
        await says(directory, "abcde", ("p", 1, 4))  # query 16 sees tokens 11 to 16
        await says(directory, "abc")  # query 12 sees tokens 7 to 12; token 7 lies in block "ab"
        directory.publish("p", EventBatch(1, 2, False, (BlocksStored(0, (a, ab)), removed(abc))))
        await says(directory, "abcde", ("p", 1, 2))

    async def test_what_lies_before_a_chunk_need_not_be_cached(self, directory: Directory) -> None:
        opened(directory, "p", 1, CHUNK)
        await says(directory, "abcd", ("p", 1, 4))
        await says(directory, "abc", ("p", 1, 2))
        await says(directory, "a")

    async def test_a_state_is_found_where_it_was_left(self, directory: Directory) -> None:
        opened(directory, "p", 1, FULL, STATE)
        ab = hashes("ab")[1]
        directory.publish("p", EventBatch(1, 1, False, (stored("abc"), BlocksStored(1, (ab,)))))
        await says(directory, "abcd", ("p", 1, 2))
        await says(directory, "ax")

    async def test_groups_of_three_kinds_agree_on_one_prefix(self, directory: Directory) -> None:
        opened(directory, "p", 1, STATE, WINDOW, FULL)
        a, _, _, abcd, abcde, abcdef = hashes("abcdef")
        everything = (
            BlocksStored(0, (a, abcdef)),
            stored("abcdef", group=1),
            stored("abcdef", group=2),
        )
        directory.publish("p", EventBatch(1, 1, False, everything))
        await says(directory, "abcdef", ("p", 1, 6))
        directory.publish("p", EventBatch(1, 2, False, (removed(abcde, group=1),)))
        # All blocks of the window that ends at "abcd" are cached, but no recurrent state at "abcd".
        # The last cached state is the one at "a".
        await says(directory, "abcdef", ("p", 1, 1))
        directory.publish("p", EventBatch(1, 3, False, (BlocksStored(0, (abcd,)),)))
        await says(directory, "abcdef", ("p", 1, 4))

    async def test_pools_are_told_apart(self, directory: Directory) -> None:
        for pool_id, path in (("q", "ab"), ("p", "abc")):
            opened(directory, pool_id, 1, FULL)
            directory.publish(pool_id, EventBatch(1, 1, False, (stored(path),)))
        await says(directory, "abcd", ("p", 1, 3), ("q", 1, 2))

    async def test_clearing_and_snapshots_replace_everything(self, directory: Directory) -> None:
        opened(directory, "p", 1, FULL)
        directory.publish("p", EventBatch(1, 1, False, (stored("a"),)))
        directory.publish("p", EventBatch(1, 2, False, (AllBlocksCleared(), stored("x"))))
        await says(directory, "x", ("p", 1, 1))
        await says(directory, "a")
        directory.publish("p", EventBatch(1, 3, True, (stored("yz"),)))
        await says(directory, "yz", ("p", 1, 2))
        await says(directory, "x")

    async def test_a_new_generation_voids_the_one_before(self, directory: Directory) -> None:
        opened(directory, "p", 1, FULL)
        directory.publish("p", EventBatch(1, 1, False, (stored("a"),)))
        opened(directory, "p", 2, FULL)
        await says(directory, "a")
        directory.publish("p", EventBatch(1, 2, False, (stored("a"),)))
        directory.publish("p", EventBatch(2, 1, False, (stored("x"),)))
        await says(directory, "x", ("p", 2, 1))
        await says(directory, "a")
        opened(directory, "p", 1, FULL)
        await says(directory, "x", ("p", 2, 1))

    async def test_only_the_newest_generation_can_be_dropped(self, directory: Directory) -> None:
        opened(directory, "p", 2, FULL)
        directory.publish("p", EventBatch(2, 1, False, (stored("a"),)))
        directory.drop("p", 1)
        directory.drop("q", 2)
        await says(directory, "a", ("p", 2, 1))
        directory.drop("p", 2)
        await says(directory, "a")
