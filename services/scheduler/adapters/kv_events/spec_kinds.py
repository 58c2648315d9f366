"""vLLM's names for the kinds of attention."""

from services.common.kv_cache_groups import AttentionType

SPEC_KINDS = {
    AttentionType.FULL: "full_attention",
    AttentionType.SLIDING_WINDOW: "sliding_window",
    AttentionType.CHUNKED_LOCAL: "chunked_local_attention",
    AttentionType.STATE_SPACE: "mamba",
}
