"""Divides prompts into chunks that end where states of recurrent layers (Mamba) can be cached."""

from collections.abc import Iterator

from services.common.pool.kv_cache_groups import last_state_position
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request


def aligned_chunk(config: SchedulerConfig, request: Request, start: int, num_tokens: int) -> int:
    """Shortens a chunk of `num_tokens` tokens from position `start`, so that it ends where a state
    can be cached. Returns its number of tokens, or 0 if the chunk does not reach such a position.
    Returns `num_tokens` for a decoding request. The rules are those of vLLM's "align" mode:

    1. A chunk that does not reach the end of the prompt ends at a block boundary. If a block is
       larger than any step, the chunk may end inside a block.
    2. If a position of `_stops` lies inside the chunk, the chunk ends there.
    """
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= prefill_end:
        return num_tokens
    size, end = config.block_size, start + num_tokens
    if end < prefill_end:
        aligned_end, most = end // size * size, config.token_budget
        most = min(most, config.long_prefill_token_threshold or most)
        if aligned_end > start or size <= most:
            end = aligned_end
    stops = [stop for stop in _stops(config, request, start, end) if start < stop < end]
    return max(min(stops, default=end) - start, 0)


def _stops(config: SchedulerConfig, request: Request, start: int, end: int) -> Iterator[int]:
    """Positions that a chunk must not cross:

    * the end of a block that an earlier step has only filled in part;
    * the last block boundary from which another request with the same tokens can continue;
    * if prefix hits may end inside a block: the last hash block boundary from which another request
      with the same prompt can continue;
    * the last block boundary in a prefix that another request shares.
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
