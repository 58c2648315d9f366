"""Prompts with known continuations."""

import random

from tests.tiny_models import VOCAB_SIZE


def random_tokens(seed: int, length: int) -> list[int]:
    """Random tokens. A seed always yields the same tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


# Sixteen prompts with a common prefix, followed by different endings of different lengths.
SHARED_PREFIX = random_tokens(1_000, 70)
PROMPTS = [SHARED_PREFIX + random_tokens(i, 5 + 3 * i) for i in range(16)]
