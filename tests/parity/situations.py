"""Prompts, the situations in which they are served, and what transformers generates for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from tests.tiny_models import VOCAB_SIZE, build_tiny_model

T = TypeVar("T")

BLOCK_SIZE = 4
MAX_TOKENS = 12
"""Three blocks; most prompts grow beyond a window of 16 to 24."""
MAX_MODEL_LEN = 128
LARGE_POOL = 2400
SMALL_POOL = 36
"""Blocks of each KV-cache group that hold two or three of the sixteen requests."""

GREEDY: dict[str, Any] = {"temperature": 0, "seed": 0, "max_tokens": MAX_TOKENS}
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "seed": 1234,
    "max_tokens": MAX_TOKENS,
}


NUM_PROMPTS = 16
SOME_PROMPTS = (1, 5, 12, 15)
"""The shortest, one of its own, and two that share a beginning."""


@dataclass(frozen=True)
class Situation:
    """How requests are served. `num_blocks` of each KV-cache group. `served`: which of the prompts,
    by number.
    """

    max_num_batched_tokens: int = 512
    num_blocks: int = LARGE_POOL
    max_num_seqs: int = 16
    served: tuple[int, ...] = tuple(range(NUM_PROMPTS))

    def chosen(self, of_prompts: Sequence[T]) -> list[T]:
        """Of what there is for each prompt, that of those which are served."""
        return [of_prompts[number] for number in self.served]


SITUATIONS = {
    "alone": Situation(max_num_seqs=1, served=SOME_PROMPTS),
    "sixteen together": Situation(),
    "chunks of 11": Situation(max_num_batched_tokens=11),
    "preempted again and again": Situation(num_blocks=SMALL_POOL, max_num_batched_tokens=48),
}


def prompts() -> list[list[int]]:
    """Sixteen prompts of 4 to 46 tokens; every third begins as the longest does."""
    random = np.random.default_rng(11)
    longest = random.integers(3, VOCAB_SIZE, 46).tolist()
    made = [
        random.integers(3, VOCAB_SIZE, 1 + 3 * number).tolist() for number in range(NUM_PROMPTS)
    ]
    return [longest[:40] + own[:6] if number % 3 == 0 else own for number, own in enumerate(made)]


@cache
@torch.inference_mode()
def reference_outputs(kind: str) -> list[list[int]]:
    """What transformers continues each prompt with, greedily; computed once for each kind.

    All prompts are computed together and anew for each token. What stands to the right of a token
    does not change it, so rows shorter than the longest need no mask.
    """
    model, given = build_tiny_model(kind), prompts()
    ends = torch.tensor([len(prompt) for prompt in given])
    rows, longest = torch.arange(len(given)), int(ends.max())
    tokens = torch.zeros((len(given), longest + MAX_TOKENS), dtype=torch.int64)
    for row, prompt in zip(tokens, given, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    for count in range(MAX_TOKENS):
        logits = model(input_ids=tokens[:, : longest + count], use_cache=False).logits
        tokens[rows, ends + count] = logits[rows, ends + count - 1].argmax(-1)
    return [
        row[end : end + MAX_TOKENS].tolist() for row, end in zip(tokens, ends.tolist(), strict=True)
    ]
