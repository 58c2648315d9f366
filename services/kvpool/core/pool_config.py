"""The shape of a pool."""

from dataclasses import dataclass

from services.common.kv_cache_groups import KVCacheGroup
from services.kvpool.core.errors import InvalidPool


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The shape of a pool. `num_blocks` includes the null block.

    `drop_last_hit_block`: the last block of a prefix hit is computed again, for a draft head that
    reads the hidden states at its end (EAGLE). Used today by recorded scenarios, since no worker
    has a draft head yet. `fingerprint` identifies the model and the cache's layout. Nothing reads
    it today; the directory in Redis will keep pools apart by it.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    enable_prefix_caching: bool = True
    fingerprint: bytes = b""
    drop_last_hit_block: bool = False


def validate_pool_config(config: PoolConfig) -> None:
    """Raises InvalidPool, naming the field. Groups are checked further when they are created."""
    if config.num_blocks < 2:
        raise InvalidPool(
            f"a pool of {config.num_blocks} blocks has only the null block",
            field="num_blocks",
        )
    if not config.groups:
        raise InvalidPool("a pool needs at least one group", field="groups")
    for index, spec in enumerate(config.groups):
        if spec.block_size < 1:
            raise InvalidPool(
                "a block holds at least one token", field=f"groups[{index}].block_size"
            )
        if spec.block_size != config.groups[0].block_size:
            raise InvalidPool(
                "groups of different block sizes are not served",
                field=f"groups[{index}].block_size",
            )
