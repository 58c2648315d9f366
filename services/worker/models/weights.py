"""Reads the weights of a native decoder from a checkpoint."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
from services.worker.backends.quantized import QuantizedWeight, Weight
from services.worker.backends.ranks import ALONE, Ranks
from services.worker.models.config import ModelConfig
from services.worker.models.files import tensor_shapes
from services.worker.models.files.checkpoint import WHOLE, Checkpoint, Index, TensorReader
from services.worker.models.files.tensor_shapes import CLASS_HEAD, EMBEDDING, HEAD
from services.worker.models.layer_config import ExpertsConfig
from services.worker.models.mlp import Experts, GroupedExperts
from services.worker.models.pooling_config import PoolingConfig
from services.worker.models.quantization import WeightReader, stored_weights
from services.worker.models.quantization_config import QuantizationSetting
from services.worker.models.shard import Shard, of_width
from services.worker.models.stage import StageLayers

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of layers read and the total number of layers."""
_Part = tuple[str, Index]
"""The name of a tensor, and the index of the part to read."""


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    kernels: Kernels,
    progress: Progress,
    ranks: Ranks = ALONE,
    pooling: PoolingConfig | None = None,
    stage: StageLayers | None = None,
    quantization: QuantizationSetting = QuantizationSetting.AUTO,
) -> DecoderWeights:
    """Reads, converts, fuses and packs all weights, layer by layer, as the kernels need them.

    Only this rank's part of divided tensors is read, and only the weights of the pipeline `stage`.
    The last stage also reads the embedding if the head is tied to it. `quantization` applies to
    projections, except routers and the head for classes.

    With `pooling`, the head is the head for classes, which is whole on each rank. If there are no
    classes, no logits are computed, and the head is a single unused row. The checkpoint may then
    contain only the decoder's body. Raises ModelError before anything is read if the tensors do not
    match `config`.
    """
    if pooling is not None and EMBEDDING not in checkpoint.tensors:
        checkpoint = checkpoint.prefixed("model.", apart=CLASS_HEAD)
    stacked = any(name.endswith(tensor_shapes.STACKED_GATE_UP) for name in checkpoint.tensors)
    expected = tensor_shapes.expected_tensors(
        config, stacked_experts=stacked, with_head=pooling is None
    )
    if HEAD in checkpoint.tensors and (pooling is not None or config.tie_word_embeddings):
        expected[HEAD] = expected[EMBEDDING]
    if pooling is not None and pooling.num_labels:
        expected[CLASS_HEAD] = (pooling.num_labels, config.hidden_size)
    tied = HEAD if config.tie_word_embeddings else None
    stored = stored_weights(checkpoint, config.quantization, expected, tied)
    stored.check(expected)
    shard = Shard(ranks.rank, ranks.size)
    stage = stage or StageLayers(0, config.num_layers, config.num_layers)
    with checkpoint.open() as reader:
        weights = WeightReader(reader, stored, dtype, quantization)
        loader = _Loader(config, reader, weights, kernels, dtype, shard, stacked)
        layers = []
        for index in stage.indexes:
            of_layer = replace(loader, prefix=f"model.layers.{index}.")
            layers.append(of_layer.layer(config.layers[index].experts))
            progress(len(layers), len(stage.indexes))
        embedding = loader.parts((EMBEDDING, ())) if stage.is_first else loader.no_rows()
        norm, head = None, None
        if stage.is_last:
            norm = loader.norm("model.norm")
            head = _head(loader, embedding, pooling, has_own=HEAD in expected)
    shard.log_read(reader.num_bytes, checkpoint.num_bytes)
    stage.log_read(reader.num_bytes, checkpoint.num_bytes)
    is_divided = pooling is None and shard.divides_head(config.vocab_size)
    head_ranks = ranks if is_divided else ALONE
    return DecoderWeights(embedding, tuple(layers), norm, head, ranks, head_ranks)


def _head(
    loader: "_Loader", embedding: torch.Tensor, pooling: PoolingConfig | None, *, has_own: bool
) -> Linear:
    if pooling is None:
        return _vocabulary_head(loader, embedding, has_own=has_own)
    head = loader.parts((CLASS_HEAD, ())) if pooling.num_labels else embedding[:1].clone()
    return loader.kernels.linear(head, None)


def _vocabulary_head(loader: "_Loader", embedding: torch.Tensor, *, has_own: bool) -> Linear:
    """Returns this rank's part of the projection to the vocabulary. If `embedding` is empty, a tied
    head is read from the checkpoint.
    """
    vocab_size = loader.config.vocab_size
    rows = loader.shard.of_head(vocab_size)
    tied = loader.config.tie_word_embeddings
    if has_own and not tied:
        head = loader.weight((HEAD, (rows,)))
    else:
        whole = len(embedding) == vocab_size
        shared = embedding[rows] if whole else loader.parts((EMBEDDING, (rows,)))
        own = _own_head(loader.parts((HEAD, (rows,))), shared) if has_own else shared
        head = loader.weights.made_head(own)
    return loader.kernels.linear(head, None)


def _own_head(head: torch.Tensor, tied: torch.Tensor) -> torch.Tensor:
    """Returns the head of a model whose config.json ties the head to the embedding. As in
    transformers, it is the checkpoint's `head` if this differs from the embedding `tied`, otherwise
    `tied` itself.
    """
    if torch.equal(head, tied):
        return tied
    logger.warning(
        "tie_word_embeddings is true, but the tensors %s and %s of the checkpoint differ: both "
        "are used",
        *(HEAD, EMBEDDING),
    )
    return head


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads and packs this rank's part of tensors whose names begin with `prefix`."""

    config: ModelConfig
    reader: TensorReader
    weights: WeightReader
    kernels: Kernels
    dtype: torch.dtype
    shard: Shard
    stacked_experts: bool
    prefix: str = ""

    def layer(self, experts: ExpertsConfig | None) -> LayerWeights:
        config, is_first = self.config, not self.shard.rank
        norms = tensor_shapes.norm_names(config)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        queries = of_width(self.shard.heads(heads, kv_heads), config.head_dim)
        keys = of_width(self.shard.kv_heads(kv_heads), config.head_dim)
        qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        weight, bias = self.fused(qkv, bias=config.qkv_bias)
        outputs = norms.attention_output, norms.mlp_output
        output_norms = [self.norm(name) if name else None for name in outputs]
        return LayerWeights(
            input_norm=self.norm("input_layernorm"),
            qkv=self.kernels.linear(weight, bias),
            query_norm=self.norm("self_attn.q_norm") if config.traits.qk_norm else None,
            key_norm=self.norm("self_attn.k_norm") if config.traits.qk_norm else None,
            output=self.summed("self_attn.o_proj", queries, bias=config.output_bias and is_first),
            attention_output_norm=output_norms[0],
            mlp_norm=self.norm(norms.mlp),
            mlp=self.mlp() if experts is None else self.experts(experts),
            mlp_output_norm=output_norms[1],
        )

    def mlp(self) -> GatedMlp:
        config, is_first = self.config, not self.shard.rank
        inner = self.shard.of(config.intermediate_size)
        gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        weight, bias = self.fused(gate_up, bias=config.mlp_bias)
        return GatedMlp(
            gate_up=self.kernels.gated_linear(weight, bias, config.traits.activation),
            down=self.summed("mlp.down_proj", inner, bias=config.mlp_bias and is_first),
        )

    def experts(self, experts: ExpertsConfig) -> Mlp:
        kernels, names = self.kernels, tensor_shapes.EXPERT_NAMES[experts.layout]
        size, stacked = experts.intermediate_size, self.stacked_experts
        inner, activation = self.shard.of(size), self.config.traits.activation
        behind = slice(inner.start + size, inner.stop + size)

        def parts_of(number: int) -> tuple[tuple[_Part, ...], _Part]:
            """An expert's input projections, gates before values, and its output projection."""
            if stacked:
                name = tensor_shapes.STACKED_GATE_UP
                gate_up = tuple((name, (number, x)) for x in (inner, behind))
                return gate_up, (tensor_shapes.STACKED_DOWN, (number, WHOLE, inner))
            gate, up = names.gate.format(number), names.up.format(number)
            return ((gate, (inner,)), (up, (inner,))), (names.down.format(number), (WHOLE, inner))

        router_name = tensor_shapes.STACKED_ROUTER if stacked else names.router
        router = kernels.linear(self.parts((router_name, ())), None)
        picking = experts.num_experts_per_tok, experts.normalized
        all_of_them = [parts_of(number) for number in range(experts.num_experts)]
        if kernels.groups_experts(self.dtype, inner.stop - inner.start):
            pairs = ((self.dense(*gate_up), self.dense(down)) for gate_up, down in all_of_them)
            together = _stacked(pairs, experts.num_experts)
            return GroupedExperts(router, *together, *picking, activation)
        apart = tuple(
            GatedMlp(
                kernels.gated_linear(self.weight(*gate_up), None, activation),
                kernels.linear(self.weight(down), None),
            )
            for gate_up, down in all_of_them
        )
        return Experts(router, apart, *picking, kernels)

    def norm(self, name: str) -> torch.Tensor:
        """Returns the weight of a norm. If the norm has an offset, the sum of weight and offset is
        not rounded to bfloat16, because that would lose more bits of a small weight than rounding
        the weight.
        """
        offset = self.config.traits.norm_weight_offset
        dtype = torch.float32 if offset else self.dtype
        weight = self.reader.read_parts((f"{self.prefix}{name}.weight", ()), dtype=dtype)
        return self.kernels.norm_weight(weight + offset if offset else weight)

    def fused(self, rows: dict[str, slice], *, bias: bool) -> tuple[Weight, torch.Tensor | None]:
        """Stacks the weights and biases of projections that have the same input. `rows` maps names
        of projections to the rows to read.
        """
        weights = ((f"{name}.weight", (taken,)) for name, taken in rows.items())
        biases = ((f"{name}.bias", (taken,)) for name, taken in rows.items())
        return self.weight(*weights), self.parts(*biases) if bias else None

    def summed(self, name: str, columns: slice, *, bias: bool) -> Linear:
        """Returns a projection of this rank's part of the input. Ranks sum the outputs."""
        weight = self.weight((f"{name}.weight", (WHOLE, columns)))
        return self.kernels.linear(weight, self.parts((f"{name}.bias", ())) if bias else None)

    def no_rows(self) -> torch.Tensor:
        device = self.reader.device
        return torch.empty((0, self.config.hidden_size), dtype=self.dtype, device=device)

    def parts(self, *parts: _Part) -> torch.Tensor:
        """Reads parts of tensors and concatenates them along the first axis (see TensorReader)."""
        return self.reader.read_parts(*self.named(parts), dtype=self.dtype)

    def weight(self, *parts: _Part) -> Weight:
        """Reads parts of projection weights and concatenates their rows (see WeightReader)."""
        return self.weights.read(*self.named(parts))

    def dense(self, *parts: _Part) -> torch.Tensor:
        """Like `weight`, but dequantizes the result."""
        weight = self.weight(*parts)
        return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight

    def named(self, parts: Iterable[_Part]) -> Iterator[_Part]:
        return ((f"{self.prefix}{name}", index) for name, index in parts)


def _stacked(
    pairs: Iterator[tuple[torch.Tensor, torch.Tensor]], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads `count` pairs of tensors, pair by pair. Stacks all first and all second tensors."""
    first = next(pairs)
    both = first[0].new_empty(count, *first[0].shape), first[1].new_empty(count, *first[1].shape)
    for number, pair in enumerate(chain((first,), pairs)):
        both[0][number], both[1][number] = pair
    return both
