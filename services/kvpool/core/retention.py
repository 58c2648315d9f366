"""Which windows and states are worth being found, where not all are kept: sparse retention."""


def replay_boundaries(
    num_prompt_tokens: int, hit_block_size: int, *, drops_last: bool
) -> list[int]:
    """Numbers of tokens at which a request with the same prompt, or a longer one, continues.

    The same prompt is found but for its last token, which is computed again. Where the last block
    of a hit is dropped it is found a block less; a longer prompt then continues a block before the
    end of this one, which is another place only if that end is aligned.
    """
    if not drops_last:
        return [num_prompt_tokens - 1]
    size = hit_block_size
    ends = {(num_prompt_tokens - 1) // size * size, num_prompt_tokens // size * size}
    return sorted({max(end - size, 0) for end in ends})
