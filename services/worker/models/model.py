"""A decoder in memory, and what is asked of it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from services.worker.backends.attention import AttentionLayer, LayerAttention
from services.worker.models.config import DtypeSetting

logger = logging.getLogger(__name__)


class Model(Protocol):
    """A decoder over a paged cache."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int64 [n] -> what the first layer sees of them, new, [n, hidden_size]."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids and positions, int64 [n] -> hidden states [n, hidden_size], and the logits of
        those that are wanted, float32 [m, vocab_size].

        `embedded` [n, hidden_size] is seen in place of `embed(token_ids)`, and may be overwritten.
        `wanted` int64 [m], rising: whose logits; None: all. No logits come where m is 0.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] -> logits, float32 [n, vocab_size]."""
        ...


def wanted_rows(whole: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor | None:
    """The rows that Model.forward is asked for; None where it is asked for none."""
    if wanted is None:
        return whole
    return whole[wanted] if len(wanted) else None


def wanted_logits(
    model: Model, hidden: torch.Tensor, wanted: torch.Tensor | None
) -> torch.Tensor | None:
    """The logits that Model.forward answers with, of hidden states that are there."""
    rows = wanted_rows(hidden, wanted)
    return None if rows is None else model.compute_logits(rows)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder in memory, and what the worker must know of it.

    `max_model_len` is the longest sequence to serve. `attention`: how each layer attends.
    `is_native`: its layers are ours, not transformers'. `rope_length`: see model_fingerprint.
    `is_static`: what it computes for a step depends on the
    number of tokens alone, never on values, so that a device can record it.
    """

    model: Model
    architecture: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    attention: tuple[AttentionLayer, ...]
    rope_length: int = 0
    is_static: bool = False
    is_native: bool = True


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is asked of a model. `max_model_len` None: what it was made for."""

    max_model_len: int | None
    dtype: DtypeSetting


def log_loading(architecture: str, directory: Path, dtype: torch.dtype) -> None:
    """Logs what is about to be read."""
    logger.info("loading %s from %s in %s", architecture, directory, str(dtype)[6:])
