"""The cached blocks by their hashes."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

from services.common.block_hash import BlockHash
from services.common.ids import BlockId


class PrefixIndex:
    """The cached blocks of one group of layers, by hash.

    Several blocks may store the same tokens, since two requests can compute them side by side. All
    of them stay: a block in a table is never exchanged, so that tables only grow. A look-up finds
    the block that was inserted first. The length counts hashes, not blocks.
    """

    __slots__ = ("_block_of", "_duplicates", "_hash_of")

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._duplicates: dict[BlockHash, OrderedDict[BlockId, None]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> list[BlockHash]:
        """Adds blocks, each under the hash beside it; returns the hashes that were not there."""
        self._hash_of.update(zip(blocks, hashes, strict=True))
        block_of = self._block_of
        if block_of.keys().isdisjoint(hashes):
            length = len(block_of) + len(hashes)
            block_of.update(zip(hashes, blocks, strict=True))
            if len(block_of) == length:
                return list(hashes)
            for block_hash in set(hashes):  # one of them came twice
                del block_of[block_hash]
        return [
            block_hash
            for block_hash, block in zip(hashes, blocks, strict=True)
            if self._insert_one(block_hash, block)
        ]

    def remove(self, blocks: Iterable[BlockId]) -> list[BlockHash]:
        """Removes those of `blocks` that are here; returns the hashes without a block left."""
        hash_of, block_of = self._hash_of, self._block_of
        blocks = [block for block in blocks if block in hash_of]
        hashes = list(map(hash_of.pop, blocks))
        if self._duplicates.keys().isdisjoint(hashes):
            for block_hash in hashes:
                del block_of[block_hash]
            return hashes
        return [
            block_hash
            for block_hash, block in zip(hashes, blocks, strict=True)
            if self._remove_one(block_hash, block)
        ]

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """The block that was published first under a hash, of those still here."""
        return self._block_of.get(block_hash)

    def find_prefix(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[BlockId]:
        """Blocks of the longest prefix of the chain that is cached, `max_blocks` at most."""
        blocks: list[BlockId] = []
        with suppress(KeyError):  # at the first one missing; what was found before stays
            blocks.extend(map(self._block_of.__getitem__, islice(hashes, max_blocks)))
        return blocks

    def clear(self) -> None:
        """Forgets everything."""
        self._block_of.clear()
        self._hash_of.clear()
        self._duplicates.clear()

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The hash that a block is found under."""
        return self._hash_of.get(block)

    def hashes(self) -> list[BlockHash]:
        """Every hash that can be found, in the order in which they were inserted."""
        return list(self._block_of)

    def blocks(self) -> list[BlockId]:
        """Every block that has a hash, duplicates included."""
        return list(self._hash_of)

    def check(self) -> None:
        """Both directions and the duplicates agree. Raises AssertionError."""
        found = {block: block_hash for block_hash, block in self._block_of.items()}
        for block_hash, others in self._duplicates.items():
            assert others, "a hash is listed with no duplicates"
            assert block_hash in self._block_of, "duplicates of a hash that is gone"
            found |= dict.fromkeys(others, block_hash)
        assert found == self._hash_of, "the two directions of the index differ"

    def _insert_one(self, block_hash: BlockHash, block: BlockId) -> bool:
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            return True
        self._duplicates.setdefault(block_hash, OrderedDict())[block] = None
        return False

    def _remove_one(self, block_hash: BlockHash, block: BlockId) -> bool:
        others = self._duplicates.get(block_hash)
        if others is None:
            del self._block_of[block_hash]
            return True
        if self._block_of[block_hash] == block:
            self._block_of[block_hash], _ = others.popitem(last=False)
        else:
            del others[block]
        if not others:
            del self._duplicates[block_hash]
        return False
