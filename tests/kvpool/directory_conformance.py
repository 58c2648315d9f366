"""What every Directory must do, whatever it is built on.

An implementation's tests subclass `DirectoryConformance` and make the directory in a fixture. A
directory may lag: the examples wait, with a deadline, until it says what it must.
"""

import asyncio

from services.common.block_hash import BlockHash
from services.kvpool.core.events import AllBlocksCleared, BlocksRemoved, BlocksStored, EventBatch
from services.kvpool.core.ports import Directory
from tests.kvpool.worked_examples import hashes

SECONDS = 5.0


def stored(path: str, group: int = 0) -> BlocksStored:
    return BlocksStored(group, tuple(hashes(path)))


def removed(*gone: BlockHash, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(group, gone)


async def says(directory: Directory, path: str, *expected: tuple[str, int, int]) -> None:
    """Waits until the directory answers as expected: (pool, generation, blocks) of each match."""
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
    """The examples; they need a fixture `directory`."""

    async def test_nothing_is_found_in_an_empty_pool(self, directory: Directory) -> None:
        directory.open("p", 1, 1)
        await says(directory, "abc")

    async def test_a_chain_is_as_deep_as_its_first_missing_block(
        self, directory: Directory
    ) -> None:
        directory.open("p", 1, 1)
        directory.publish("p", EventBatch(1, 1, False, (stored("abc"),)))
        await says(directory, "abc", ("p", 1, 3))
        await says(directory, "abx", ("p", 1, 2))
        await says(directory, "x")
        directory.publish("p", EventBatch(1, 2, False, (removed(hashes("ab")[1]),)))
        await says(directory, "abc", ("p", 1, 1))

    async def test_events_apply_in_order(self, directory: Directory) -> None:
        directory.open("p", 1, 1)
        (a,) = hashes("a")
        batch = EventBatch(1, 1, False, (stored("a"), removed(a), stored("ab"), removed(a)))
        directory.publish("p", batch)
        directory.publish("p", EventBatch(1, 2, False, (stored("x"),)))
        await says(directory, "x", ("p", 1, 1))
        await says(directory, "ab")

    async def test_every_group_must_hold_a_block(self, directory: Directory) -> None:
        directory.open("p", 1, 2)
        directory.publish("p", EventBatch(1, 1, False, (stored("abc"),)))
        directory.publish("p", EventBatch(1, 2, False, (stored("ab", group=1),)))
        await says(directory, "abc", ("p", 1, 2))
        directory.publish("p", EventBatch(1, 3, False, (removed(hashes("a")[0], group=1),)))
        await says(directory, "abc")

    async def test_pools_are_told_apart(self, directory: Directory) -> None:
        for pool_id, path in (("q", "ab"), ("p", "abc")):
            directory.open(pool_id, 1, 1)
            directory.publish(pool_id, EventBatch(1, 1, False, (stored(path),)))
        await says(directory, "abcd", ("p", 1, 3), ("q", 1, 2))

    async def test_clearing_and_snapshots_replace_everything(self, directory: Directory) -> None:
        directory.open("p", 1, 1)
        directory.publish("p", EventBatch(1, 1, False, (stored("a"),)))
        directory.publish("p", EventBatch(1, 2, False, (AllBlocksCleared(), stored("x"))))
        await says(directory, "x", ("p", 1, 1))
        await says(directory, "a")
        directory.publish("p", EventBatch(1, 3, True, (stored("yz"),)))
        await says(directory, "yz", ("p", 1, 2))
        await says(directory, "x")

    async def test_a_new_generation_voids_the_one_before(self, directory: Directory) -> None:
        directory.open("p", 1, 1)
        directory.publish("p", EventBatch(1, 1, False, (stored("a"),)))
        directory.open("p", 2, 1)
        await says(directory, "a")
        directory.publish("p", EventBatch(1, 2, False, (stored("a"),)))
        directory.publish("p", EventBatch(2, 1, False, (stored("x"),)))
        await says(directory, "x", ("p", 2, 1))
        await says(directory, "a")
        directory.open("p", 1, 1)
        await says(directory, "x", ("p", 2, 1))

    async def test_only_the_newest_generation_can_be_dropped(self, directory: Directory) -> None:
        directory.open("p", 2, 1)
        directory.publish("p", EventBatch(2, 1, False, (stored("a"),)))
        directory.drop("p", 1)
        directory.drop("q", 2)
        await says(directory, "a", ("p", 2, 1))
        directory.drop("p", 2)
        await says(directory, "a")
