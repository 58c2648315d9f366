"""Computes the longest request that fits in the pool, and detects conflicting settings."""

from bisect import bisect_right

from services.scheduler.core.config import SchedulerConfig


def max_request_tokens(config: SchedulerConfig) -> int:
    """The number of tokens of the longest request that fits in the empty pool, at most
    `max_model_len`.

    All KV-cache groups allocate from this pool. Full attention needs blocks for all tokens. Sliding
    windows and states need as many blocks as a request can hold at one time. This number is largest
    when as many of the largest steps as possible are in flight, or when a step verifies drafts
    while drafts of the previous step may still be rejected.
    """
    num_tokens_in_flight = max(config.max_in_flight_tokens, 1 + 2 * config.num_speculative_tokens)
    num_tokens_in_flight += config.num_lookahead_tokens

    def num_held_blocks(num_tokens: int) -> int:
        return sum(
            group.max_held_blocks(num_tokens, num_tokens_in_flight, config.num_steps_in_flight)
            for group in config.all_groups
        )

    lengths = range(config.max_model_len + 1)
    return bisect_right(lengths, config.num_blocks - 1, key=num_held_blocks) - 1


def config_conflict(config: SchedulerConfig) -> str | None:
    """A sentence that says why no request can be served with this configuration, or None."""
    if config.enable_prefix_caching and config.overwrites_states:
        return (
            "prefix caching is not possible, because each step overwrites the states of recurrent "
            "layers: start the workers with mamba_cache_mode align, or disable prefix caching"
        )
    if config.aligns_states and not config.enable_chunked_prefill:
        return (
            "prefix caching of state-space layers computes prompts in chunks of whole blocks: "
            "enable chunked prefill, or disable prefix caching"
        )
    if config.aligns_states and config.disable_chunked_mm_input:
        return (
            "states of recurrent layers are cached at ends of blocks, which may be inside a "
            "multimodal item of a prompt: set disable_chunked_mm_input to false"
        )
    if not config.enable_chunked_prefill and config.token_budget < config.max_model_len:
        return (
            f"without chunked prefill a step of at most {config.token_budget} tokens cannot "
            f"compute a sequence of {config.max_model_len}: raise max_num_batched_tokens of the "
            "worker, or enable chunked prefill"
        )
    return None
