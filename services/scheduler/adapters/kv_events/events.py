"""Events of the prefix cache as vLLM has them: with parent hashes and token ids."""

from dataclasses import dataclass

from services.common.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one request, in chain order, that can be found now in one group of layers."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """Hash of the block before the first; None if that begins the sequence."""
    token_ids: bytes
    """Tokens of all blocks, little-endian int32."""
    group_idx: int
    cache_salt: str
    """The salt that is part of the first block of the sequence, and so of every hash after it."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that can no longer be found in one group of layers."""

    block_hashes: tuple[BlockHash, ...]
    group_idx: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be found any more."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events of one transaction. Numbers begin at 0 and grow by one."""

    sequence: int
    unix_seconds: float
    events: tuple[KVCacheEvent, ...]


def external_block_hash(block_hash: BlockHash) -> int:
    """The last 64 bits of a hash, unsigned: the form in which vLLM publishes its own by default.
    Consumers take it as a name and compute nothing from it.
    """
    return int.from_bytes(block_hash[-8:], "big")
