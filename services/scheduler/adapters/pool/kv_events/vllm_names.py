"""vLLM's names for what events are about."""

from services.common.pool.kv_cache_groups import AttentionType

SPEC_KINDS = {
    AttentionType.FULL: "full_attention",
    AttentionType.SLIDING_WINDOW: "sliding_window",
    AttentionType.CHUNKED_LOCAL: "chunked_local_attention",
    AttentionType.STATE_SPACE: "mamba",
}

MEDIUM = "GPU"
"""The memory that the workers compute on, whatever device it is."""
