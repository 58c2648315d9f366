"""vLLM's names for values in events."""

from services.common.pool.kv_cache_groups import AttentionType

SPEC_KINDS = {
    AttentionType.FULL: "full_attention",
    AttentionType.SLIDING_WINDOW: "sliding_window",
    AttentionType.CHUNKED_LOCAL: "chunked_local_attention",
    AttentionType.STATE_SPACE: "mamba",
}

MEDIUM = "GPU"
"""The memory in which the workers' KV cache lies, on any device."""
