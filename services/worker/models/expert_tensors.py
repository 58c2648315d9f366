"""Names and shapes of the experts of a layer in a checkpoint.

A checkpoint holds tensors for each expert, under the names of its architecture, or all experts of a
layer stacked, as transformers holds them in memory.
"""

from dataclasses import dataclass

from services.worker.models.architecture import ExpertLayout
from services.worker.models.layer_config import ExpertsConfig

Shapes = dict[str, tuple[int, ...]]

STACKED_ROUTER = "mlp.gate.weight"
STACKED_GATE_UP = "mlp.experts.gate_up_proj"
STACKED_DOWN = "mlp.experts.down_proj"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's tensors; `{}` in those of an expert stands for its number."""

    router: str
    gate: str
    up: str
    down: str


_NAMES = {
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


def expert_names(config: ExpertsConfig) -> ExpertNames:
    """Names within a layer, for checkpoints with tensors for each expert."""
    return _NAMES[config.layout]


def expert_tensors(config: ExpertsConfig, hidden_size: int, *, stacked: bool) -> Shapes:
    """Name within a layer and shape of every tensor of router and experts."""
    count, inner = config.num_experts, config.intermediate_size
    if stacked:
        return {
            STACKED_ROUTER: (count, hidden_size),
            STACKED_GATE_UP: (count, 2 * inner, hidden_size),
            STACKED_DOWN: (count, hidden_size, inner),
        }
    names = expert_names(config)
    shapes: Shapes = {names.router: (count, hidden_size)}
    for number in range(count):
        shapes[names.gate.format(number)] = (inner, hidden_size)
        shapes[names.up.format(number)] = (inner, hidden_size)
        shapes[names.down.format(number)] = (hidden_size, inner)
    return shapes
