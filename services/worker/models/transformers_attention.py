"""Attention for models that transformers runs: its attention interface, answered from our cache.

Models of transformers call the attention function that their configuration names. Ours is
registered under ATTENTION_NAME and hands each call to whoever `answering` put in charge of the
thread: the step of a paged cache, or a probe. Flattened batches need no masks: which tokens belong
together is the cache's business, so no function that makes masks is registered beside it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from services.worker.backends.attention import LayerAttention

ATTENTION_NAME = "stepwell"

Answer = Callable[..., torch.Tensor]
"""Called as transformers calls attention; returns [1, n, num_heads, head_dim]."""

_answer: ContextVar[Answer] = ContextVar("answer")


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Within it, attention of models that transformers runs in this thread is `answer`'s."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def from_cache(attention: LayerAttention) -> Answer:
    """Attention of a flattened batch over a paged cache. Queries and keys come rotated."""

    def answer(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        heads = [x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value)]
        layer: Any = module.layer_idx
        attended = attention(layer, heads[0], heads[1], heads[2], None)
        return attended.view(1, *heads[0].shape)

    return answer


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: heads [1, heads, n, head_dim]."""
    return _answer.get()(module, query, key, value, *args, **options), None


AttentionInterface.register(ATTENTION_NAME, _attend)
