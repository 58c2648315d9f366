"""Where the steps of a prompt end if states are cached."""

from collections.abc import Iterator

from services.common.pool.kv_cache_groups import last_state_position
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request


def aligned_chunk(config: SchedulerConfig, request: Request, start: int, num_tokens: int) -> int:
    """How many of `num_tokens` tokens from `start` on a request gets, so that a step ends where a
    state can be cached. 0 if the budget does not reach that far. Decoding requests get all tokens.

    1. A step that does not reach the end of the prompt ends on a block boundary, unless a block is
       larger than any step.
    2. It ends earlier at a position that must not be passed over; see `_stops`.

    As in vLLM's "align" mode.
    """
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= prefill_end:
        return num_tokens
    size, end = config.block_size, start + num_tokens
    if end < prefill_end:
        aligned_end = end // size * size
        if aligned_end > start or size <= _longest_step(config):
            end = aligned_end
    stops = [stop for stop in _stops(config, request, start, end) if start < stop < end]
    return max(min(stops, default=end) - start, 0)


def _stops(config: SchedulerConfig, request: Request, start: int, end: int) -> Iterator[int]:
    """Positions at which a step must end if it comes past them: the end of a block that an earlier
    step left unfinished; the last block boundary that others can hit, and with hits inside a block
    the last such position in the prompt; and the block boundary up to which another request shares
    the prefix.
    """
    size, drops_last = config.block_size, config.drop_last_hit_block
    if start % size:
        yield (start // size + 1) * size
    last = last_state_position(request.num_tokens, size, drops_last=drops_last)
    yield last
    if config.has_partial_hits:
        tail = last_state_position(
            request.num_prompt_tokens, config.hash_block_size, drops_last=drops_last
        )
        if last < tail < request.num_prompt_tokens:
            yield tail
    junction = request.shared_prefix_boundary
    if start < junction < end:
        yield start + (junction - start) // size * size


def _longest_step(config: SchedulerConfig) -> int:
    """Most tokens of one request in a step that others share."""
    threshold = config.long_prefill_token_threshold
    return min(config.token_budget, threshold) if threshold else config.token_budget
