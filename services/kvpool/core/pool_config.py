"""The configuration of a pool."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.common.pool.kv_cache_groups import (
    AttentionType,
    KVCacheGroup,
    has_partial_hits,
    hash_block_size,
    hit_block_size,
)
from services.kvpool.core.errors import InvalidPool, UnsupportedGroup


@dataclass(frozen=True, slots=True)
class PoolConfig:
    num_blocks: int
    """The number of blocks, the null block included."""
    groups: tuple[KVCacheGroup, ...]
    enable_prefix_caching: bool = True
    fingerprint: bytes = b""
    """Identifies the model and the layout of its KV cache. Directories of cached prefixes identify
    a pool by `fingerprint` and `node`, which is the pool's name.
    """
    drop_last_hit_block: bool = False
    """Whether the last block of a prefix hit is computed again, because a draft head (EAGLE) needs
    its hidden states. No worker has such a head, but scenarios recorded from vLLM set this field.
    """
    node: str = ""
    prefix_match_unit: int | None = None
    """Number of tokens in a block hash. None selects `kv_cache_groups.hash_block_size`."""
    prefix_cache_retention_interval: int | None = None
    """The distance in tokens between two windows or states in the prefix index. Windows and states
    are also added where prompts end or diverge, because later requests are likely to continue
    there. With 0, they are added only there. With None, all windows and states are added.
    """
    max_model_len: int | None = None
    """Number of tokens of the longest sequence. Together with `max_in_flight_tokens` it limits the
    number of free blocks that an admission requires in a group with windows. If either field is
    None, that number is not limited.
    """
    max_in_flight_tokens: int | None = None
    """Limit on the total number of tokens in all steps that are in flight at once."""

    @property
    def hash_block_size(self) -> int:
        """Number of tokens per block hash."""
        return hash_block_size(
            self.groups, self.prefix_match_unit, enable_prefix_caching=self.enable_prefix_caching
        )

    @property
    def has_partial_hits(self) -> bool:
        """Whether prefix hits may end inside a block."""
        return self.enable_prefix_caching and has_partial_hits(self.groups, self.hash_block_size)

    @property
    def cache_hit_alignment(self) -> int:
        """The length of every hit is a multiple of this number of tokens."""
        return self.hash_block_size if self.has_partial_hits else hit_block_size(self.groups)

    @property
    def eagle_groups(self) -> frozenset[int]:
        """Groups in which a hit's last block is dropped."""
        if not self.drop_last_hit_block:
            return frozenset()
        marked = {index for index, group in enumerate(self.groups) if group.is_eagle_group}
        return frozenset(marked or range(len(self.groups)))

    def validate(self) -> None:
        """Checks all fields. Raises InvalidPool or UnsupportedGroup, which name the field."""
        if self.num_blocks < 2:
            raise InvalidPool(
                f"num_blocks is {self.num_blocks}, but a pool needs the null block and at least "
                "one more",
                field="num_blocks",
            )
        if not self.groups:
            raise InvalidPool("a pool needs at least one KV-cache group", field="groups")
        for index, group in enumerate(self.groups):
            if group.block_size < 1:
                field = f"groups[{index}].block_size"
                raise InvalidPool("block_size must be at least 1 token", field=field)
        for index, group in enumerate(self.groups):
            for name, conflict in self._group_conflicts(group):
                if conflict is not None:
                    raise UnsupportedGroup(conflict, field=f"groups[{index}].{name}")
        self._validate_units()

    def _group_conflicts(self, group: KVCacheGroup) -> Iterator[tuple[str, str | None]]:
        """Yields pairs of a field's name and the reason why its value is invalid, or None."""
        yield "window", _window_conflict(group)
        is_chunked = group.attention_type is AttentionType.CHUNKED_LOCAL
        is_state = group.attention_type is AttentionType.STATE_SPACE
        if is_chunked and self.drop_last_hit_block:
            yield (
                "attention_type",
                "chunked local attention cannot be used with drop_last_hit_block",
            )
        if is_chunked and group.block_size != hit_block_size(self.groups):
            yield "block_size", "chunked local attention needs the same block_size in all groups"
        if is_state and self.enable_prefix_caching and not group.aligns_states:
            yield (
                "mamba_cache_mode",
                "prefix caching needs a mamba_cache_mode that keeps states at the ends of blocks",
            )
        if group.num_speculative_blocks and not is_state:
            yield (
                "num_speculative_blocks",
                "only state-space groups may have num_speculative_blocks",
            )

    def _validate_units(self) -> None:
        unit, interval = self.prefix_match_unit, self.prefix_cache_retention_interval
        sizes = [group.block_size for group in self.groups]
        if unit is not None and (unit < 1 or any(size % unit for size in sizes)):
            raise InvalidPool(
                f"prefix_match_unit is {unit}, but not all block sizes, {sizes}, are multiples of "
                "it",
                field="prefix_match_unit",
            )
        if unit is not None and len(sizes) == 1 and unit != sizes[0]:
            raise InvalidPool(
                f"prefix_match_unit is {unit}, but with one group it must equal the block size, "
                f"{sizes[0]}",
                field="prefix_match_unit",
            )
        size = hit_block_size(self.groups)
        if interval is not None and (interval < 0 or interval % size):
            raise InvalidPool(
                f"prefix_cache_retention_interval is {interval}, but must be a multiple of {size}",
                field="prefix_cache_retention_interval",
            )
        kinds = {group.attention_type for group in self.groups}
        if interval and kinds.isdisjoint((AttentionType.SLIDING_WINDOW, AttentionType.STATE_SPACE)):
            raise InvalidPool(
                "prefix_cache_retention_interval needs a group with a sliding window or states",
                field="prefix_cache_retention_interval",
            )


def _window_conflict(group: KVCacheGroup) -> str | None:
    window, size = group.window, group.block_size
    match group.attention_type:
        case AttentionType.FULL if window:
            return f"a group of full attention must have window 0, not {window}"
        case AttentionType.STATE_SPACE if window:
            return f"a group of state-space layers must have window 0, not {window}"
        case AttentionType.SLIDING_WINDOW if window < 2:
            return f"a sliding window must have at least 2 tokens, not {window}"
        case AttentionType.CHUNKED_LOCAL if window < 1 or window % size:
            return f"chunks of {window} tokens are not a whole number of blocks of {size} tokens"
    return None
