"""The cached blocks, indexed by hash."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from services.common.pool.block_hash import BlockHash
from services.common.pool.ids import BlockId


class PrefixIndex:
    """Maps hashes to the cached blocks of one group.

    Several blocks may have the same hash, since two requests can compute the same tokens at the
    same time. All of these blocks stay in the index, because a block in a block table is never
    replaced by an equal one. A look-up returns the block that was inserted first. `len` counts
    hashes, not blocks.

    If prefixes may end inside a block, a block can have several hashes: one for each prefix that
    ends in the block. The index then also stores the length of the first hash's prefix.
    """

    __slots__ = ("_block_of", "_duplicates", "_end_of", "_further", "_hash_of", "num_changes")

    def __init__(self) -> None:
        self.num_changes = 0
        """The number of additions and removals. Results of look-ups are valid until it changes."""
        self._block_of: dict[BlockHash, BlockId] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._duplicates: dict[BlockHash, OrderedDict[BlockId, None]] = {}
        self._further: dict[BlockId, dict[BlockHash, None]] = {}
        self._end_of: dict[BlockId, int] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def insert(self, hashes: Sequence[BlockHash], blocks: Sequence[BlockId]) -> list[BlockHash]:
        """Adds blocks, each under the hash at its position. Returns the hashes that are new."""
        self.num_changes += bool(hashes)
        hash_of, block_of = self._hash_of, self._block_of
        new: list[BlockHash] = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            hash_of[block] = block_hash
            if block_hash in block_of:
                self._add_duplicate(block_hash, block)
            else:
                block_of[block_hash] = block
                new.append(block_hash)
        return new

    def remove(self, blocks: Iterable[BlockId]) -> list[BlockHash]:
        """Removes those `blocks` that have a hash. Returns hashes that lost their last block."""
        hash_of, block_of = self._hash_of, self._block_of
        blocks = [block for block in blocks if block in hash_of]
        if not blocks:
            return []
        self.num_changes += 1
        hashes = list(map(hash_of.pop, blocks))
        if self._end_of:
            for block in list(blocks):
                self._end_of.pop(block, None)
                further = self._further.pop(block, {})
                hashes += further
                blocks += [block] * len(further)
        if not self._duplicates or self._duplicates.keys().isdisjoint(hashes):
            for block_hash in hashes:
                del block_of[block_hash]
            return hashes
        return [
            block_hash
            for block_hash, block in zip(hashes, blocks, strict=True)
            if self._remove_one(block_hash, block)
        ]

    def insert_at(self, block_hash: BlockHash, block: BlockId, end: int) -> bool:
        """Adds the hash of the first `end` tokens to a block. Returns whether the hash is new."""
        first = self._hash_of.get(block)
        if first == block_hash or block_hash in self._further.get(block, ()):
            return False
        self.num_changes += 1
        if first is None:
            self._hash_of[block], self._end_of[block] = block_hash, end
        else:
            self._further.setdefault(block, {})[block_hash] = None
        return self._insert_one(block_hash, block)

    def move(self, source: BlockId, target: BlockId) -> None:
        """Moves the hashes of `source` to `target`, which has no hash."""
        end = self._end_of.get(source, 0)
        hashes = self.hashes_of(source)
        self.remove([source])
        for block_hash in hashes:
            self.insert_at(block_hash, target, end)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Returns the first published block that has this hash, or None."""
        return self._block_of.get(block_hash)

    def find_prefix(self, hashes: Sequence[BlockHash], max_blocks: int) -> list[BlockId]:
        """Returns the blocks of the chain's longest cached prefix, at most `max_blocks`."""
        blocks: list[BlockId] = []
        with suppress(KeyError):  # ends at the first miss, after the hits
            blocks.extend(map(self._block_of.__getitem__, islice(hashes, max_blocks)))
        return blocks

    def clear(self) -> None:
        self.num_changes += 1
        self._block_of.clear()
        self._hash_of.clear()
        self._duplicates.clear()
        self._further.clear()
        self._end_of.clear()

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The first hash of a block, or None."""
        return self._hash_of.get(block)

    def hashes_of(self, block: BlockId) -> list[BlockHash]:
        first = self._hash_of.get(block)
        return [] if first is None else [first, *self._further.get(block, ())]

    def end_of(self, block: BlockId) -> int | None:
        """The number of tokens that a block's first hash covers. None for a block from `insert`."""
        return self._end_of.get(block)

    def hashes(self) -> list[BlockHash]:
        return list(self._block_of)

    def blocks(self) -> list[BlockId]:
        """All blocks that have a hash, duplicates included."""
        return list(self._hash_of)

    def check(self) -> None:
        """Checks that both mappings and the list of duplicates agree. Raises AssertionError."""
        found = set(zip(self._block_of.values(), self._block_of, strict=True))
        for block_hash, others in self._duplicates.items():
            assert others, "a hash is listed with no duplicates"
            assert block_hash in self._block_of, "duplicates of a hash that is gone"
            found |= {(block, block_hash) for block in others}
        named = set(self._hash_of.items())
        for block, further in self._further.items():
            named |= {(block, block_hash) for block_hash in further}
        assert found == named, "the two directions of the index differ"
        assert self._further.keys() <= self._hash_of.keys(), "further hashes without a first one"
        assert self._end_of.keys() <= self._hash_of.keys(), "an end without a hash"

    def check_table(
        self, blocks: Sequence[BlockId], allowed: Sequence[Collection[BlockHash]]
    ) -> None:
        """Checks that each block has only hashes that are allowed for it. Raises AssertionError."""
        for block, hashes in zip(blocks, allowed, strict=True):
            if block in self._hash_of:
                found = self.hashes_of(block)
                assert set(found) <= set(hashes), f"block {block} is not under its hash"

    def _insert_one(self, block_hash: BlockHash, block: BlockId) -> bool:
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            return True
        self._add_duplicate(block_hash, block)
        return False

    def _add_duplicate(self, block_hash: BlockHash, block: BlockId) -> None:
        self._duplicates.setdefault(block_hash, OrderedDict())[block] = None

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
