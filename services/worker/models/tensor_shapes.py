"""Names and shapes of the tensors in checkpoints of native architectures."""

from dataclasses import dataclass

from services.worker.models.config import ModelConfig
from services.worker.models.expert_tensors import Shapes, expert_tensors

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms; None for one that it does not have.

    `post_attention_layernorm` is another norm in Gemma than in Llama.
    """

    attention_output: str | None
    mlp: str
    mlp_output: str | None


_PLAIN = NormNames(None, "post_attention_layernorm", None)
_OUTPUT_NORMALIZED = NormNames(
    "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def norm_names(config: ModelConfig) -> NormNames:
    """The names of norms within a layer."""
    return _OUTPUT_NORMALIZED if config.output_norms else _PLAIN


def expected_tensors(config: ModelConfig, *, stacked_experts: bool) -> Shapes:
    """The name and shape of every tensor in a checkpoint of this configuration.

    `stacked_experts`: the experts of a layer are stacked in one tensor.
    """
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for index, layer in enumerate(config.layers):
        tensors = _attention_tensors(config)
        if layer.experts is None:
            tensors |= _mlp_tensors(config)
        else:
            tensors |= expert_tensors(layer.experts, config.hidden_size, stacked=stacked_experts)
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in tensors.items()})
    return shapes


def _attention_tensors(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    norms = norm_names(config)
    named = ("input_layernorm", norms.attention_output, norms.mlp, norms.mlp_output)
    shapes: Shapes = {f"{name}.weight": (hidden,) for name in named if name is not None}
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes | _projections(
        {
            "self_attn.q_proj": (queries, hidden, config.qkv_bias),
            "self_attn.k_proj": (keys, hidden, config.qkv_bias),
            "self_attn.v_proj": (keys, hidden, config.qkv_bias),
            "self_attn.o_proj": (hidden, queries, config.output_bias),
        }
    )


def _mlp_tensors(config: ModelConfig) -> Shapes:
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    return _projections(
        {
            "mlp.gate_proj": (inner, hidden, bias),
            "mlp.up_proj": (inner, hidden, bias),
            "mlp.down_proj": (hidden, inner, bias),
        }
    )


def _projections(shapes: dict[str, tuple[int, int, bool]]) -> Shapes:
    """Weights, and the biases of those that have them."""
    tensors: Shapes = {}
    for name, (rows, columns, bias) in shapes.items():
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)
    return tensors
