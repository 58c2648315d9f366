"""Cuts prompts into chunks that end where the states of recurrent layers can be cached."""

from collections.abc import Iterator

from services.common.pool.kv_cache_groups import last_state_position
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request


def aligned_chunk(config: SchedulerConfig, request: Request, start: int, num_tokens: int) -> int:
    """How many of `num_tokens` tokens from `start` on a step computes, so that it ends where a
    state can be cached. 0 if the tokens do not reach such a position. A decoding request gets all
    `num_tokens`.

    1. A step that does not reach the end of the prompt ends on a block boundary. If a block is
       larger than any step, the step may end inside the block.
    2. The step ends earlier if a position of `_stops` lies inside it.

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
    """Positions that a step must not cross without ending there:

    * the end of a block that an earlier step left unfinished;
    * the last block boundary that other requests can hit;
    * with hits inside a block, the last position in the prompt that other requests can hit;
    * the last block boundary of the prefix that another request shares.
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
    """The largest number of tokens that one request can get in a step with other requests."""
    threshold = config.long_prefill_token_threshold
    return min(config.token_budget, threshold) if threshold else config.token_budget
