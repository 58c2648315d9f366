"""A reference in plain Python for the race of exponential variates by which tokens are sampled. It
shares no code with the sampler.
"""

import math

_MASK = 2**64 - 1


def philox_states(seed: int, position: int) -> tuple[int, int]:
    c = [position & 0xFFFFFFFF, position >> 32, 0, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[1] << 32 | c[0], c[3] << 32 | c[2]


def split_mix_64(state: int, index: int) -> int:
    z = (state + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def exponential_of(seed: int, position: int, token_id: int) -> float:
    blocks, tokens = philox_states(seed, position)
    block, place = token_id // 4096 * 128 + token_id % 128, token_id % 4096 // 128
    word = split_mix_64(blocks, block)
    smallest = _exponential(word) / 32
    if word % 32 == place:
        return smallest
    return smallest + _exponential(split_mix_64(tokens, token_id))


def _exponential(word: int) -> float:
    return -math.log(((word >> 12) + 0.5) / 2**52)
