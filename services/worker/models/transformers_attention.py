"""Attention for models that transformers runs: an implementation of its attention interface.

Models of transformers call the attention function that their configuration names. Ours is
registered under ATTENTION_NAME and passes each call to the function that `attending_with` has set
for the thread: a step over a paged cache, or a probe. No function that makes masks is registered,
since the cache determines which tokens each token of a flattened batch sees.
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

AttendFunction = Callable[..., torch.Tensor]
"""Called as transformers calls attention; returns [1, n, num_heads, head_dim]."""

_attend_function: ContextVar[AttendFunction] = ContextVar("attend")


@contextmanager
def attending_with(attend: AttendFunction) -> Iterator[None]:
    """Within it, attention of models that transformers runs in this thread is `attend`."""
    token = _attend_function.set(attend)
    try:
        yield
    finally:
        _attend_function.reset(token)


def from_cache(attention: LayerAttention) -> AttendFunction:
    """Attention of a flattened batch over a paged cache. Queries and keys come rotated."""

    def attend(
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

    return attend


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: heads [1, heads, n, head_dim]."""
    return _attend_function.get()(module, query, key, value, *args, **options), None


AttentionInterface.register(ATTENTION_NAME, _attend)
