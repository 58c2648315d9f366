"""Names and shapes of the tensors in checkpoints of native architectures.

Checkpoints store the experts of a layer in one of two forms: each expert has its own tensors, named
as in the architecture, or all are stacked in one tensor, as transformers stores them in memory.
"""

from dataclasses import dataclass

from services.worker.models.architecture import ExpertLayout
from services.worker.models.config import ModelConfig
from services.worker.models.layer_config import ExpertsConfig

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
CLASS_HEAD = "score.weight"
"""The weight that projects the last token's hidden state to class scores, without a bias."""
STACKED_ROUTER = "mlp.gate.weight"
STACKED_GATE_UP = "mlp.experts.gate_up_proj"
STACKED_DOWN = "mlp.experts.down_proj"


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms, or None for a norm that the layer lacks. In Llama,
    `post_attention_layernorm` is the norm before the MLP. In Gemma, it is the norm of the attention
    output.
    """

    attention_output: str | None
    mlp: str
    mlp_output: str | None


_PLAIN = NormNames(None, "post_attention_layernorm", None)
_OUTPUT_NORMALIZED = NormNames(
    "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a layer's expert tensors. `{}` stands for the expert's number."""

    router: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = {
    ExpertLayout.MIXTRAL: ExpertNames(
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{}.w1.weight",
        up="block_sparse_moe.experts.{}.w3.weight",
        down="block_sparse_moe.experts.{}.w2.weight",
    ),
    ExpertLayout.QWEN3: ExpertNames(
        router="mlp.gate.weight",
        gate="mlp.experts.{}.gate_proj.weight",
        up="mlp.experts.{}.up_proj.weight",
        down="mlp.experts.{}.down_proj.weight",
    ),
}
"""Names of tensors within a layer, for checkpoints with separate tensors for each expert."""


def norm_names(config: ModelConfig) -> NormNames:
    return _OUTPUT_NORMALIZED if config.traits.output_norms else _PLAIN


def expected_tensors(
    config: ModelConfig, *, stacked_experts: bool, with_head: bool = True
) -> Shapes:
    """The name and shape of every tensor in a checkpoint of this configuration.

    `stacked_experts`: the experts of a layer are stacked in one tensor. `with_head`: the checkpoint
    has the projection to the vocabulary.
    """
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        NORM: (config.hidden_size,),
    }
    if with_head and not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for index, layer in enumerate(config.layers):
        tensors = _layer_tensors(config, layer.experts, stacked_experts=stacked_experts)
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in tensors.items()})
    return shapes


def _layer_tensors(
    config: ModelConfig, experts: ExpertsConfig | None, *, stacked_experts: bool
) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    norms = norm_names(config)
    named = ("input_layernorm", norms.attention_output, norms.mlp, norms.mlp_output)
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in named if name is not None}
    if config.traits.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
    }
    if experts is not None:
        shapes |= _expert_tensors(experts, hidden, stacked=stacked_experts)
    else:
        projections |= {
            "mlp.gate_proj": (inner, hidden, config.mlp_bias),
            "mlp.up_proj": (inner, hidden, config.mlp_bias),
            "mlp.down_proj": (hidden, inner, config.mlp_bias),
        }
    for name, (rows, columns, bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def _expert_tensors(config: ExpertsConfig, hidden_size: int, *, stacked: bool) -> Shapes:
    count, inner = config.num_experts, config.intermediate_size
    if stacked:
        return {
            STACKED_ROUTER: (count, hidden_size),
            STACKED_GATE_UP: (count, 2 * inner, hidden_size),
            STACKED_DOWN: (count, hidden_size, inner),
        }
    names = EXPERT_NAMES[config.layout]
    shapes: Shapes = {names.router: (count, hidden_size)}
    for number in range(count):
        shapes[names.gate.format(number)] = (inner, hidden_size)
        shapes[names.up.format(number)] = (inner, hidden_size)
        shapes[names.down.format(number)] = (hidden_size, inner)
    return shapes
