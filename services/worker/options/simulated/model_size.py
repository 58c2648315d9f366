"""The numbers of a model, or of one rank's part of it, from which step times are computed."""

from dataclasses import dataclass

import torch

from services.worker.backends.attention import AttentionLayer
from services.worker.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelSize:
    weight_bytes: int
    """Bytes of all weights."""
    read_bytes: int
    """Bytes of weights that a step reads: all weights except rows of the embedding."""
    products_per_token: int
    """Multiplications of a weight for each token. Only the experts of a token are counted."""
    attention_width: int
    """Elements of all queries of a token: heads times head size, summed over layers."""
    kv_bytes_per_token: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    itemsize: int
    """Bytes of an element of the model's data type."""


def model_size(
    config: ModelConfig, attention: tuple[AttentionLayer, ...], dtype: torch.dtype, num_ranks: int
) -> ModelSize:
    """`attention`: the layers of this rank, whose heads are divided. The inner widths of MLPs and
    the output projection are divided evenly. `config`: of the whole model.
    """
    hidden, itemsize = config.hidden_size, dtype.itemsize
    queries = sum(layer.num_heads * layer.head_dim for layer in attention)
    keys = sum(layer.num_kv_heads * layer.head_dim for layer in attention)
    stored = used = 2 * hidden * (queries + keys)
    for layer in config.layers:
        experts = layer.experts
        if experts is None:
            num_stored, num_used, inner = 1, 1, config.intermediate_size
        else:
            num_stored, num_used = experts.num_experts, experts.num_experts_per_tok
            inner = experts.intermediate_size
        stored += num_stored * 3 * hidden * inner // num_ranks
        used += num_used * 3 * hidden * inner // num_ranks
    bits = 8 * itemsize if config.quantization is None else config.quantization.bits
    embedding = config.vocab_size * hidden
    read_bytes = stored * bits // 8 + embedding // num_ranks * itemsize
    whole = embedding * itemsize
    return ModelSize(
        weight_bytes=read_bytes + (0 if config.tie_word_embeddings else whole),
        read_bytes=read_bytes,
        products_per_token=used + embedding // num_ranks,
        attention_width=queries,
        kv_bytes_per_token=2 * keys * itemsize,
        hidden_size=hidden,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        itemsize=itemsize,
    )
