"""Reads the weights of a native decoder from a checkpoint."""

import logging
from collections.abc import Callable, Iterator
from itertools import chain

import torch

from services.worker.backends.kernels import (
    DecoderWeights,
    GatedMlp,
    Kernels,
    LayerWeights,
    Linear,
    Mlp,
)
from services.worker.models.checkpoint import WHOLE, Checkpoint, TensorReader
from services.worker.models.config import ModelConfig
from services.worker.models.expert_tensors import (
    STACKED_DOWN,
    STACKED_GATE_UP,
    STACKED_ROUTER,
    expert_names,
)
from services.worker.models.layer_config import ExpertsConfig
from services.worker.models.mlp import Experts, GroupedExperts, SummedMlp
from services.worker.models.shard import Shard, of_width
from services.worker.models.tensor_shapes import (
    EMBEDDING,
    HEAD,
    NORM,
    expected_tensors,
    norm_names,
)
from services.worker.parallel.ranks import ALONE, GatheredLinear, Ranks, SummedLinear

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of layers read and the number there are."""


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Progress,
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """Reads, converts, fuses and packs all weights, layer by layer, as the kernels need them. Only
    this rank's part of tensors that are divided is read.

    Raises ModelError before anything is read when the tensors are not those of `config`.
    """
    shard = Shard(ranks.rank, ranks.size)
    stacked = any(name.endswith(STACKED_GATE_UP) for name in checkpoint.tensors)
    expected = expected_tensors(config, stacked_experts=stacked)
    if config.tie_word_embeddings and HEAD in checkpoint.tensors:
        expected[HEAD] = expected[EMBEDDING]
    checkpoint.check(expected)
    with checkpoint.open() as reader:
        layers = []
        for index in range(config.num_layers):
            layer = _LayerReader(reader, kernels, index, dtype, config.norm_weight_offset)
            layers.append(_load_layer(config, index, layer, ranks, stacked=stacked))
            progress(index + 1, config.num_layers)
        embedding = reader.read(EMBEDDING, dtype=dtype)
        rows = shard.of_head(config.vocab_size)
        head = embedding[rows]
        if HEAD in expected:
            head = _own_head(reader.read_parts((HEAD, (rows,)), dtype=dtype), head, config)
        norm = _read_norm(reader, kernels, NORM, dtype, config.norm_weight_offset)
    shard.log_read(reader.num_bytes, sum(checkpoint.tensors[name].num_bytes for name in expected))
    projection = kernels.linear(head, None)
    if len(head) < config.vocab_size:
        projection = GatheredLinear(projection, ranks)
    return DecoderWeights(embedding, tuple(layers), norm, projection)


def _own_head(head: torch.Tensor, tied: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The checkpoint's head, or the embedding that it is tied to if the two are equal.

    If they differ the head is used, also if config.json ties them: as in transformers.
    """
    if not config.tie_word_embeddings:
        return head
    if torch.equal(head, tied):
        return tied
    logger.warning(
        "tie_word_embeddings is true, but %s differs from %s: it is used as it is",
        *(HEAD, EMBEDDING),
    )
    return head


def _summed(part: Linear, ranks: Ranks) -> Linear:
    return SummedLinear(part, ranks) if ranks.size > 1 else part


class _LayerReader:
    """Reads tensors of one layer."""

    def __init__(
        self,
        reader: TensorReader,
        kernels: Kernels,
        index: int,
        dtype: torch.dtype,
        norm_weight_offset: float,
    ) -> None:
        self._reader = reader
        self.kernels = kernels
        self._prefix = f"model.layers.{index}."
        self.dtype = dtype
        self._offset = norm_weight_offset

    def norm(self, name: str) -> torch.Tensor:
        name = f"{self._prefix}{name}.weight"
        return _read_norm(self._reader, self.kernels, name, self.dtype, self._offset)

    def fused(
        self, rows: dict[str, slice], *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of projections of the same input, stacked; of each, some rows."""
        weights = ((f"{name}.weight", (taken,)) for name, taken in rows.items())
        biases = ((f"{name}.bias", (taken,)) for name, taken in rows.items())
        return self.parts(*weights), self.parts(*biases) if bias else None

    def columns(
        self, name: str, taken: slice, *, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Some columns of a projection's weight, and its bias."""
        weight = self.parts((f"{name}.weight", (WHOLE, taken)))
        return weight, self.parts((f"{name}.bias", ())) if bias else None

    def parts(self, *parts: tuple[str, tuple[slice | int, ...]]) -> torch.Tensor:
        """Parts of tensors, stacked along their first axis. See TensorReader."""
        named = ((f"{self._prefix}{name}", index) for name, index in parts)
        return self._reader.read_parts(*named, dtype=self.dtype)


def _load_layer(
    config: ModelConfig, index: int, layer: _LayerReader, ranks: Ranks, *, stacked: bool
) -> LayerWeights:
    shard, width = Shard(ranks.rank, ranks.size), config.head_dim
    queries = of_width(shard.heads(config.num_heads, config.num_kv_heads), width)
    keys = of_width(shard.kv_heads(config.num_kv_heads), width)
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    output = layer.columns("self_attn.o_proj", queries, bias=config.output_bias and not shard.rank)
    experts = config.layers[index].experts
    norms = norm_names(config)
    return LayerWeights(
        input_norm=layer.norm("input_layernorm"),
        qkv=layer.kernels.linear(*layer.fused(qkv, bias=config.qkv_bias)),
        query_norm=layer.norm("self_attn.q_norm") if config.qk_norm else None,
        key_norm=layer.norm("self_attn.k_norm") if config.qk_norm else None,
        output=_summed(layer.kernels.linear(*output), ranks),
        attention_output_norm=layer.norm(norms.attention_output)
        if norms.attention_output
        else None,
        mlp_norm=layer.norm(norms.mlp),
        mlp=_load_mlp(config, layer, ranks)
        if experts is None
        else _load_experts(config, experts, layer, ranks, stacked=stacked),
        mlp_output_norm=layer.norm(norms.mlp_output) if norms.mlp_output else None,
    )


def _load_mlp(config: ModelConfig, layer: _LayerReader, ranks: Ranks) -> GatedMlp:
    shard = Shard(ranks.rank, ranks.size)
    inner = shard.of(config.intermediate_size)
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    weight, bias = layer.fused(gate_up, bias=config.mlp_bias)
    down = layer.columns("mlp.down_proj", inner, bias=config.mlp_bias and not shard.rank)
    return GatedMlp(
        gate_up=layer.kernels.gated_linear(weight, bias, config.activation),
        down=_summed(layer.kernels.linear(*down), ranks),
    )


def _load_experts(
    config: ModelConfig,
    experts: ExpertsConfig,
    layer: _LayerReader,
    ranks: Ranks,
    *,
    stacked: bool,
) -> Mlp:
    kernels, names = layer.kernels, expert_names(experts)
    inner = Shard(ranks.rank, ranks.size).of(experts.intermediate_size)
    behind = slice(inner.start + experts.intermediate_size, inner.stop + experts.intermediate_size)

    def read(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The input projections of an expert, gates before values, and its output projection."""
        if stacked:
            gate_up = layer.parts(*((STACKED_GATE_UP, (number, rows)) for rows in (inner, behind)))
            down = layer.parts((STACKED_DOWN, (number, WHOLE, inner)))
        else:
            gate, up = names.gate.format(number), names.up.format(number)
            gate_up = layer.parts((gate, (inner,)), (up, (inner,)))
            down = layer.parts((names.down.format(number), (WHOLE, inner)))
        return gate_up, down

    router = kernels.linear(layer.parts((STACKED_ROUTER if stacked else names.router, ())), None)
    picking = experts.num_experts_per_tok, experts.normalized
    all_of_them = (read(number) for number in range(experts.num_experts))
    mlp: Mlp
    if kernels.groups_experts(layer.dtype, inner.stop - inner.start):
        together = _stacked(all_of_them, experts.num_experts)
        mlp = GroupedExperts(router, *together, *picking, config.activation)
    else:
        apart = tuple(
            GatedMlp(
                kernels.gated_linear(gate_up, None, config.activation), kernels.linear(down, None)
            )
            for gate_up, down in all_of_them
        )
        mlp = Experts(router, apart, *picking, kernels)
    return SummedMlp(mlp, ranks) if ranks.size > 1 else mlp


def _stacked(
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tensors of so many pairs in one, and the second, one pair read after the other."""
    first = next(pairs)
    both = first[0].new_empty(count, *first[0].shape), first[1].new_empty(count, *first[1].shape)
    for number, pair in enumerate(chain((first,), pairs)):
        both[0][number], both[1][number] = pair
    return both


def _read_norm(
    reader: TensorReader, kernels: Kernels, name: str, dtype: torch.dtype, offset: float
) -> torch.Tensor:
    """The weight of a norm. One with an offset is not rounded: a small weight would lose more bits
    to the sum than bfloat16 took from it.
    """
    if offset:
        return kernels.norm_weight(reader.read(name, dtype=torch.float32) + offset)
    return kernels.norm_weight(reader.read(name, dtype=dtype))
