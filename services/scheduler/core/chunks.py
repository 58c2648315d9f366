"""Where the chunks of a prompt end when states are cached."""

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request


def aligned_chunk(config: SchedulerConfig, request: Request, start: int, num_tokens: int) -> int:
    """How many of `num_tokens` tokens from `start` on a request should get, so that a step ends
    where a state can be cached. 0 if the budget does not reach that far: it waits for a fuller one.

    Chunks end on block boundaries, one of them on the last that can be a hit for others; what is
    left of the prompt comes in a chunk of its own. Where a hit's last block is dropped, the last
    boundary of use lies one block earlier. Decoding is left alone. As in vLLM's "align" mode.
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
