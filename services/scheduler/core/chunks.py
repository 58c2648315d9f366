"""Where the chunks of a prompt end if states are cached.

No worker has state-space layers today: tests use this, and hybrid models will.
"""

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request


def aligned_chunk(config: SchedulerConfig, request: Request, start: int, num_tokens: int) -> int:
    """How many of `num_tokens` tokens from `start` on a request gets, so that a step ends where a
    state can be cached. 0 if the budget does not reach that far.

    Chunks end on block boundaries, one of them on the last that other requests can hit; the rest of
    the prompt is a chunk of its own. If the last block of a hit is dropped, that boundary is one
    block earlier. Decoding requests get all tokens. As in vLLM's "align" mode.
    """
    if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
        return num_tokens
    size, end = config.block_size, start + num_tokens
    last = request.num_tokens // size * size
    if config.drop_last_hit_block:
        last = max(0, last - size)
    if end < last:
        return max(0, end // size * size - start)
    if start < last:
        return last - start
    return num_tokens
