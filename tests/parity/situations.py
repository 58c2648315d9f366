"""Prompts, situations in which they are served (such as a small pool), and the continuations that
transformers computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from services.worker.build import build_worker
from services.worker.core.worker import Worker
from services.worker.settings import WorkerSettings
from tests.tiny_models import VOCAB_SIZE, build_tiny_model

T = TypeVar("T")

BLOCK_SIZE = 4
MAX_TOKENS = 12
"""The number of output tokens of a request. It is three blocks, so that most sequences exceed a
window of 16 to 24 tokens.
"""
MAX_MODEL_LEN = 128
LARGE_POOL = 2400
SMALL_POOL = 36
"""A number of blocks of each KV-cache group that fits only two or three of sixteen requests."""

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
"""Numbers of the shortest prompt, of a prompt without a common prefix, and of two with one."""


@dataclass(frozen=True)
class Situation:
    """How requests are served. `num_blocks` is the number of blocks of each KV-cache group.
    `served` has the numbers of the prompts that are served.
    """

    max_num_batched_tokens: int = 512
    num_blocks: int = LARGE_POOL
    max_num_seqs: int = 16
    served: tuple[int, ...] = tuple(range(NUM_PROMPTS))

    def chosen(self, of_prompts: Sequence[T]) -> list[T]:
        """Selects the items of served prompts. `of_prompts` has an item for each prompt."""
        return [of_prompts[number] for number in self.served]


def settings_of(directory: Path, **others: Any) -> WorkerSettings:
    """The settings of a worker that is large enough for each situation."""
    room = {"num_blocks": LARGE_POOL, "max_num_seqs": NUM_PROMPTS, "max_num_batched_tokens": 512}
    lengths = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
    return WorkerSettings(model=directory, **room | lengths | others)  # type: ignore[arg-type]


def build(directory: Path, **others: Any) -> Worker:
    return build_worker(settings_of(directory, **others), directory.name, lambda: None)


SITUATIONS = {
    "alone": Situation(max_num_seqs=1, served=SOME_PROMPTS),
    "sixteen together": Situation(),
    "chunks of 11": Situation(max_num_batched_tokens=11),
    "preempted again and again": Situation(num_blocks=SMALL_POOL, max_num_batched_tokens=48),
}


def prompts() -> list[list[int]]:
    """Sixteen prompts of 4 to 46 tokens. Every third prompt has a prefix of the longest prompt."""
    random = np.random.default_rng(11)
    longest = random.integers(3, VOCAB_SIZE, 46).tolist()
    made = [
        random.integers(3, VOCAB_SIZE, 1 + 3 * number).tolist() for number in range(NUM_PROMPTS)
    ]
    return [longest[:40] + own[:6] if number % 3 == 0 else own for number, own in enumerate(made)]


@cache
@torch.inference_mode()
def reference_outputs(kind: str) -> list[list[int]]:
    """Transformers' greedy continuation of each prompt, computed once for each kind of model.

    For each new token, all prompts are computed together from the start. They are padded on the
    right. No mask is needed, because later positions do not influence earlier ones.
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
