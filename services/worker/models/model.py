"""The interface of a decoder, and a loaded decoder with its properties."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from services.worker.backends.attention import AttentionLayer, LayerAttention, StateLayer
from services.worker.backends.lora import LoraRows
from services.worker.models.config import DtypeSetting
from services.worker.models.lora.reader import LoraReader
from services.worker.models.pooling_config import PoolingConfig
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.models.stage import StageLayers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The input of a model for a step. The step has n tokens."""

    token_ids: torch.Tensor
    """int64 [n]."""
    positions: torch.Tensor
    """int64 [n]."""
    attention: LayerAttention
    embedded: torch.Tensor | None = None
    """Embeddings [n, hidden_size] that replace `embed(token_ids)`, and may be overwritten. In a
    later pipeline stage, the hidden states of the previous stage.
    """
    wanted: torch.Tensor | None = None
    """int64 [m]: ascending indexes of the tokens whose logits are returned. None means all tokens.
    """
    lora: LoraRows | None = None
    """The adapters of the tokens, if the model supports LoRA."""


class Model(Protocol):
    """A decoder over a paged cache."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Maps token ids, int64 [n], to the first layer's input, a new tensor [n, hidden_size]."""

    def forward(self, given: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns hidden states [n, hidden_size] and the wanted logits, float32 [m, vocab_size], or
        None if m is 0. Pipeline stages before the last return no logits.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [n, hidden_size] to logits, float32 [n, vocab_size]."""


def wanted_rows(whole: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the rows of `whole` at `wanted` (None: all), or None if `wanted` is empty."""
    if wanted is None:
        return whole
    return whole[wanted] if len(wanted) else None


def wanted_logits(
    model: Model, hidden: torch.Tensor, wanted: torch.Tensor | None
) -> torch.Tensor | None:
    """The logits that Model.forward returns, computed from hidden states."""
    rows = wanted_rows(hidden, wanted)
    return None if rows is None else model.compute_logits(rows)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Model
    architecture: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    attention: tuple[AttentionLayer, ...]
    """The attention layers of the whole model, also those of other pipeline stages, in order."""
    states: tuple[StateLayer, ...] = ()
    """The states of each recurrent layer, empty if the model has no such layers."""
    rope_length: int = 0
    """The sequence length from which rotary frequencies are computed, or 0 if it has no effect."""
    is_static: bool = False
    """Whether operations depend only on the number of tokens, so that a device can record them."""
    is_native: bool = True
    """Whether Stepwell's own layers compute the model. Otherwise transformers' layers do."""
    stage: StageLayers | None = None
    """The layers that `model` has. None means all layers."""
    lora: LoraReader | None = None
    """Reads LoRA adapters, or None if the model does not support LoRA."""

    @property
    def own_attention(self) -> tuple[AttentionLayer, ...]:
        """The attention layers of this pipeline stage."""
        if self.stage is None:
            return self.attention
        return self.attention[self.stage.start : self.stage.stop]

    def own_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Converts indexes in the whole model to indexes in `model`, for the layers that it has."""
        return tuple(layers) if self.stage is None else self.stage.of_group(layers)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    max_model_len: int | None
    """The maximum length of a sequence, in tokens. None means the model's own limit."""
    dtype: DtypeSetting
    pooling: PoolingConfig | None = None
    """How prompts are pooled, or None if the model generates text."""
    stage: int = 0
    """The pipeline stage to load, of `num_stages`."""
    num_stages: int = 1
    quantization: QuantizationSetting = QuantizationSetting.AUTO
    """How weights of native models are quantized at load."""


def resolve_dtype(
    setting: DtypeSetting, checkpoint_dtype: str | None, *, has_bfloat16: bool
) -> torch.dtype:
    """The data type of computations.

    AUTO is bfloat16 if the checkpoint is bfloat16 and the model's operations are fast in bfloat16
    (`has_bfloat16`). Otherwise it is float32, which represents the numbers of every checkpoint
    exactly.
    """
    match setting:
        case DtypeSetting.FLOAT32:
            return torch.float32
        case DtypeSetting.BFLOAT16:
            return torch.bfloat16
    return torch.bfloat16 if checkpoint_dtype == "bfloat16" and has_bfloat16 else torch.float32


def log_loading(architecture: str, directory: Path, dtype: torch.dtype) -> None:
    logger.info("loading %s from %s in %s", architecture, directory, str(dtype)[6:])
