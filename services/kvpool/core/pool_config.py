"""The shape of a pool."""

from dataclasses import dataclass

from services.common.kv_cache_groups import AttentionType, KVCacheGroup
from services.kvpool.core.errors import InvalidPool, UnsupportedGroup


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The shape of a pool. `num_blocks` includes the null block.

    `drop_last_hit_block`: the last block of a prefix hit is computed again, for a draft head that
    reads the hidden states at its end (EAGLE). Used today by recorded scenarios, since no worker
    has a draft head yet. `fingerprint` identifies the model and the cache's layout, and `node` the
    pool of one scheduler process: directories keep pools apart by them.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    enable_prefix_caching: bool = True
    fingerprint: bytes = b""
    drop_last_hit_block: bool = False
    node: str = ""

    def validate(self) -> None:
        """Raises InvalidPool or UnsupportedGroup, naming the field."""
        if self.num_blocks < 2:
            raise InvalidPool(
                f"a pool of {self.num_blocks} blocks has only the null block", field="num_blocks"
            )
        if not self.groups:
            raise InvalidPool("a pool needs at least one group", field="groups")
        for index, group in enumerate(self.groups):
            field = f"groups[{index}].block_size"
            if group.block_size < 1:
                raise InvalidPool("a block holds at least one token", field=field)
            if group.block_size != self.groups[0].block_size:
                raise InvalidPool("groups of different block sizes are not served", field=field)
        for index, group in enumerate(self.groups):
            if (conflict := _window_conflict(group)) is not None:
                raise UnsupportedGroup(conflict, field=f"groups[{index}].window")
            if self.drop_last_hit_block and group.attention_type is AttentionType.CHUNKED_LOCAL:
                raise UnsupportedGroup(
                    "hits of chunked local attention cannot drop their last block",
                    field=f"groups[{index}].attention_type",
                )


def _window_conflict(group: KVCacheGroup) -> str | None:
    """Why a group cannot have its window, in one sentence; None if it can."""
    window, size = group.window, group.block_size
    match group.attention_type:
        case AttentionType.FULL if window:
            return f"full attention has no window, here {window} tokens"
        case AttentionType.STATE_SPACE if window:
            return f"state-space layers have no window, here {window} tokens"
        case AttentionType.SLIDING_WINDOW if window < 2:
            return f"a sliding window of {window} tokens shows nothing of the past"
        case AttentionType.CHUNKED_LOCAL if window < 1 or window % size:
            return f"chunks of {window} tokens are no whole blocks of {size}"
    return None
