"""The plan by which a model of transformers is divided over ranks. The model's class defines it,
except for OPT and OLMo 2.

A plan maps layer names to styles. A layer divided by columns outputs a part of the whole output. A
layer divided by rows has a part of the whole input, and the ranks sum its outputs. In two further
styles, a layer gathers the whole output, or selects its part of the whole input. This is
Megatron-LM's division, as in backends/ranks.py.
"""

import enum
import re

from transformers import PreTrainedModel

from services.worker.models.from_transformers.probe import Refused


class Style(enum.Enum):
    """How a layer is divided, named as in transformers' plans. The last style is Stepwell's."""

    COLUMNS = "colwise"
    ROWS = "rowwise"
    COLUMNS_GATHERED = "colwise_gather_output"
    ROWS_OF_WHOLE_INPUT = "rowwise_split_input"
    NORM_OF_GATHERED = "norm_of_gathered"


_FORMER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "embedding_rowwise"})
"""Styles of layers that are whole on each rank: norms of single heads, and embeddings."""

_SUMMED = {Style.ROWS, Style.ROWS_OF_WHOLE_INPUT}

_OPT = {
    "model.decoder.layers.*.self_attn.q_proj": "colwise",
    "model.decoder.layers.*.self_attn.k_proj": "colwise",
    "model.decoder.layers.*.self_attn.v_proj": "colwise",
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
    "lm_head": "colwise_gather_output",
}
_OLMO2 = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.q_norm": "norm_of_gathered",
    "model.layers.*.self_attn.k_norm": "norm_of_gathered",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
_OWN = {"opt": _OPT, "olmo2": _OLMO2}
"""Stepwell's plans, by model type. transformers has no plan for OPT. With its plan for OLMo 2, each
rank would have all heads, and therefore the whole KV cache, because norms span all heads.
"""


def read_plan(model: PreTrainedModel) -> dict[str, Style]:
    """Maps names of layers to styles. Raises Refused if there is no plan, or an unknown style."""
    if any(getattr(model.config, "activation_sparsity_pattern", None) or ()):
        raise Refused(
            "cannot be divided among ranks: its MLPs compare all activations of a layer "
            "(activation_sparsity_pattern)"
        )
    styles = _OWN.get(model.config.model_type) or model.tp_plan or {}
    modules = [module for module, _ in model.named_modules()]
    known = {style.value: style for style in Style}
    plan: dict[str, Style] = {}
    for pattern, name in styles.items():
        style = known.get(_FORMER_NAMES.get(name, name))
        if style is not None:
            plan |= dict.fromkeys(_matching(pattern, modules), style)
        elif name not in _WHOLE:
            tensors = [tensor for tensor, _ in model.named_parameters()]
            if named := _matching(pattern, modules + tensors):
                raise Refused(
                    f"has a tensor-parallel plan whose style {name!r} of {named[0]} is not "
                    "supported"
                )
    if not _SUMMED & set(plan.values()):  # the plan divides nothing, or only the head
        raise Refused(
            "has no tensor-parallel plan in transformers, so it cannot be divided among ranks"
        )
    return plan


def _matching(pattern: str, names: list[str]) -> list[str]:
    """Names that match the pattern. A star matches one component of a dotted name."""
    matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
    return [name for name in names if matches(name)]
