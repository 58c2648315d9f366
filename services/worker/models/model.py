"""The interface of a decoder, and a decoder in memory with its properties."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from services.worker.backends.attention import AttentionLayer, LayerAttention, StateLayer
from services.worker.backends.lora import LoraRows
from services.worker.models.config import DtypeSetting
from services.worker.models.pooling_config import PoolingConfig
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.models.stage import StageLayers

if TYPE_CHECKING:
    from services.worker.models.lora.reader import LoraReader

logger = logging.getLogger(__name__)


class Model(Protocol):
    """A decoder over a paged cache."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int64 [n] -> the input of the first layer, a new tensor [n, hidden_size]."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: LayerAttention,
        embedded: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
        lora: LoraRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids and positions, int64 [n] -> hidden states [n, hidden_size], and the logits of
        the wanted ones, float32 [m, vocab_size], or None if m is 0.

        `embedded` [n, hidden_size] replaces `embed(token_ids)`, and may be overwritten. `wanted`
        int64 [m]: rising indexes of the tokens whose logits are returned; None: of all.

        A pipeline stage that is not the first begins with `embedded`, which are the hidden states
        of the stage before; one that is not the last returns no logits. `lora`: the adapters of
        the tokens, for a model that takes any.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] -> logits, float32 [n, vocab_size]."""


def wanted_rows(whole: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor | None:
    """The wanted rows, see Model.forward; None if no rows are wanted."""
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
    """A decoder in memory, and its properties."""

    model: Model
    architecture: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_model_len: int
    """The longest sequence to serve."""
    eos_token_ids: tuple[int, ...]
    attention: tuple[AttentionLayer, ...]
    """Each layer with attention, in order, also those that other pipeline stages compute."""
    states: tuple[StateLayer, ...] = ()
    """The state of each recurrent layer."""
    rope_length: int = 0
    """See model_fingerprint."""
    is_static: bool = False
    """Whether the operations of a step depend on the number of tokens alone, never on values, so
    that a device can record them.
    """
    is_native: bool = True
    """Whether its layers are those of this package, and not of transformers."""
    stage: StageLayers | None = None
    """The layers of `model`; None: all."""
    lora: "LoraReader | None" = None
    """Reads adapters; None if the model takes none."""

    @property
    def own_attention(self) -> tuple[AttentionLayer, ...]:
        """The attention of each layer of `model`."""
        if self.stage is None:
            return self.attention
        return self.attention[self.stage.start : self.stage.stop]

    def own_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        """The layers of `layers` that are in `model`, by their index there."""
        return tuple(layers) if self.stage is None else self.stage.of_group(layers)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of loading a model."""

    max_model_len: int | None
    """None: the model's own limit."""
    dtype: DtypeSetting
    pooling: PoolingConfig | None = None
    """None for a model that generates."""
    stage: int = 0
    """The pipeline stage to load, of `num_stages`."""
    num_stages: int = 1
    quantization: QuantizationSetting = QuantizationSetting.AUTO
    """How weights of native models are quantized at load."""


def resolve_dtype(setting: DtypeSetting, checkpoint_dtype: str | None) -> torch.dtype:
    """The data type to compute in.

    Auto is bfloat16 for a bfloat16 checkpoint on a processor that computes in it, else float32,
    which represents the numbers of every checkpoint exactly.
    """
    match setting:
        case DtypeSetting.FLOAT32:
            return torch.float32
        case DtypeSetting.BFLOAT16:
            return torch.bfloat16
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    stored_so = checkpoint_dtype == "bfloat16"
    return torch.bfloat16 if stored_so and has_bfloat16 else torch.float32


def log_loading(architecture: str, directory: Path, dtype: torch.dtype) -> None:
    """Logs which model is read, from where, in which data type."""
    logger.info("loading %s from %s in %s", architecture, directory, str(dtype)[6:])
