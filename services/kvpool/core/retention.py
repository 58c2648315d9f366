"""Sparse retention: decides which windows and states are published if only some of them are."""


def replay_boundaries(
    num_prompt_tokens: int, hit_block_size: int, *, drops_last: bool
) -> list[int]:
    """Token counts at which a request with the same or a longer prompt continues.

    The same prompt hits all tokens except the last one, which is computed again. If the last block
    of a hit is dropped, the hit is one block shorter. A longer prompt then continues one block
    before the end of this prompt. The two positions differ only if the prompt's length is a
    multiple of `hit_block_size`.
    """
    if not drops_last:
        return [num_prompt_tokens - 1]
    size = hit_block_size
    ends = {(num_prompt_tokens - 1) // size * size, num_prompt_tokens // size * size}
    return sorted({max(end - size, 0) for end in ends})
