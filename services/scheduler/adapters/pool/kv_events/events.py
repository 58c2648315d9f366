"""Events of the prefix cache (blocks that the pool caches or evicts), with tokens, as in vLLM."""

from dataclasses import dataclass

from services.common.pool.block_hash import BlockHash
from services.common.pool.kv_cache_groups import AttentionType


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """The cache salt and the adapter, which are part of the hash of a sequence's first block."""

    cache_salt: str = ""
    lora_name: str = ""
    adapter_digest: bytes = b""
    """SHA-256 of the files of the adapter."""

    @property
    def lora_id(self) -> int | None:
        """A positive int32 that is derived from the adapter's digest, or None without an adapter.
        vLLM's processes number adapters themselves, so their ids differ.
        """
        if not self.adapter_digest:
            return None
        return int.from_bytes(self.adapter_digest[:4], "big") >> 1 or 1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one request that were published (cached) in one KV-cache group."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """Hash of the block before the first block. None at the beginning of a sequence."""
    token_ids: bytes
    """Tokens of all blocks, little-endian int32."""
    group_idx: int
    namespace: CacheNamespace

    @property
    def block_size(self) -> int:
        """Number of tokens in each block. Smaller if only part of a block was published."""
        return len(self.token_ids) // (4 * len(self.block_hashes))

    @property
    def extra_keys(self) -> list[tuple[str, ...] | None]:
        """What each block's hash depends on besides tokens, in vLLM's format: the adapter's name
        and, for the first block of a sequence, the cache salt.
        """
        adapter = (self.namespace.lora_name,) if self.namespace.lora_name else ()
        keys: list[tuple[str, ...] | None] = [adapter or None] * len(self.block_hashes)
        if self.parent_block_hash is None and self.namespace.cache_salt:
            keys[0] = (*adapter, self.namespace.cache_salt)
        return keys


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that were removed from the prefix index of one KV-cache group."""

    block_hashes: tuple[BlockHash, ...]
    group_idx: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All blocks were removed from the prefix index."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The events of one transaction. Sequence numbers begin at 0 and increase by one."""

    sequence: int
    unix_seconds: float
    events: tuple[KVCacheEvent, ...]


def external_block_hash(block_hash: BlockHash) -> int:
    """The last 64 bits of a hash as an unsigned number, as vLLM publishes by default."""
    return int.from_bytes(block_hash[-8:], "big")


SPEC_KINDS = {
    AttentionType.FULL: "full_attention",
    AttentionType.SLIDING_WINDOW: "sliding_window",
    AttentionType.CHUNKED_LOCAL: "chunked_local_attention",
    AttentionType.STATE_SPACE: "mamba",
}

MEDIUM = "GPU"
"""vLLM's name for the memory of the KV cache, used whatever the workers' device is."""
