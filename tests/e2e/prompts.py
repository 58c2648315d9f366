"""Prompts whose continuations are known."""

import random

from tests.tiny_models import VOCAB_SIZE


def random_tokens(seed: int, length: int) -> list[int]:
    """The same tokens for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


# Sixteen prompts that begin alike and go on differently, each of another length.
SHARED_PREFIX = random_tokens(1_000, 70)
PROMPTS = [SHARED_PREFIX + random_tokens(i, 5 + 3 * i) for i in range(16)]
