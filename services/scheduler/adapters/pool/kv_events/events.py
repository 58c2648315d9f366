"""Events of the prefix cache as vLLM has them: with parent hashes and token ids."""

from dataclasses import dataclass

from services.common.pool.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """What every hash of a sequence stands for besides its tokens: its salt, which is part of the
    first block, and its adapter. Empty: it has none.
    """

    cache_salt: str = ""
    lora_name: str = ""
    adapter_digest: bytes = b""
    """SHA-256 of the files of the adapter."""

    @property
    def lora_id(self) -> int | None:
        """A positive int32 that stands for the adapter's content; None: there is no adapter. vLLM
        counts the adapters of a process instead.
        """
        if not self.adapter_digest:
            return None
        return int.from_bytes(self.adapter_digest[:4], "big") >> 1 or 1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one request, in chain order, that can be found now in one group of layers."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """Hash of the block before the first; None if that begins the sequence."""
    token_ids: bytes
    """Tokens of all blocks, little-endian int32."""
    group_idx: int
    namespace: CacheNamespace

    @property
    def block_size(self) -> int:
        """Tokens of a block; of a hash, where it is about a part of a block."""
        return len(self.token_ids) // (4 * len(self.block_hashes))

    @property
    def extra_keys(self) -> list[tuple[str, ...] | None]:
        """For each block what its hash has besides tokens, in vLLM's form: the adapter, then, in
        the first block of a sequence, the salt.
        """
        adapter = (self.namespace.lora_name,) if self.namespace.lora_name else ()
        keys: list[tuple[str, ...] | None] = [adapter or None] * len(self.block_hashes)
        if self.parent_block_hash is None and self.namespace.cache_salt:
            keys[0] = (*adapter, self.namespace.cache_salt)
        return keys


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
