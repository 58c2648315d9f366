"""The configuration of each layer, from config.json: windows, rotary embeddings and experts."""

from dataclasses import dataclass

from services.worker.models.architecture import ExpertLayout, Traits, Windows
from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.json_file import JsonReader
from services.worker.models.rope import RopeConfig, read_ropes

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a layer: gated MLPs. A router picks a few of them for each token.

    `normalized`: the weights of the picked experts are scaled to a sum of 1.
    """

    layout: ExpertLayout
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    normalized: bool


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Properties that may differ from layer to layer.

    `window`: the number of tokens that a query attends to, including its own token, or None for all
    previous tokens. `experts` is None if the layer has one dense MLP.
    """

    window: int | None
    rope: RopeConfig
    experts: ExpertsConfig | None


def read_layers(reader: JsonReader, traits: Traits, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns the configuration of every layer, in order. Raises ModelConfigError."""
    windows = _windows(reader, traits, num_layers)
    rope, sliding_rope = read_ropes(reader, theta=traits.theta, local_theta=traits.local_theta)
    experts = _experts(reader, traits)
    return tuple(
        LayerConfig(
            window=window,
            rope=rope if window is None else sliding_rope,
            experts=experts if _routes(reader, traits, index) else None,
        )
        for index, window in enumerate(windows)
    )


def _windows(reader: JsonReader, traits: Traits, num_layers: int) -> list[int | None]:
    sliding = _sliding_layers(reader, traits, num_layers)
    is_absent = "sliding_window" not in reader and traits.default_window is None
    if not any(sliding) or is_absent or reader.is_null("sliding_window"):
        return [None] * num_layers
    window = reader.integer("sliding_window", traits.default_window, least=2)
    return [window if slides else None for slides in sliding]


def _sliding_layers(reader: JsonReader, traits: Traits, num_layers: int) -> list[bool]:
    match traits.windows:
        case Windows.NONE:
            return [False] * num_layers
        case Windows.ALL:
            return [True] * num_layers
        case Windows.LISTED:
            return _listed(reader, num_layers) or [True] * num_layers
        case Windows.ALL_IF_ENABLED:
            return [reader.boolean("use_sliding_window", False)] * num_layers
        case Windows.UPPER_IF_ENABLED:
            enabled = reader.boolean("use_sliding_window", False)
            first = reader.integer("max_window_layers", 28, least=0) if enabled else num_layers
            listed = _listed(reader, num_layers)
            if listed is not None and any(listed) and not enabled:
                raise reader.error("layer_types", "slide, but use_sliding_window is not true")
            return listed or [index >= first for index in range(num_layers)]
        case Windows.PATTERN:
            pattern = reader.integer("sliding_window_pattern", traits.window_pattern)
            listed = _listed(reader, num_layers)
            return listed or [(index + 1) % pattern != 0 for index in range(num_layers)]


def _listed(reader: JsonReader, num_layers: int) -> list[bool] | None:
    """Returns whether each layer has a window, from `layer_types`, or None if the key is absent."""
    types = reader.raw("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise reader.error("layer_types", f"must list {num_layers} layers")
    for name in types:
        if name not in (FULL, SLIDING):
            raise UnsupportedModel(
                reader.path, f"layer_types {name!r} is not supported; supported: {FULL}, {SLIDING}"
            )
    return [name == SLIDING for name in types]


def _experts(reader: JsonReader, traits: Traits) -> ExpertsConfig | None:
    match traits.experts:
        case None:
            return None
        case ExpertLayout.MIXTRAL:
            count = reader.count("num_local_experts", reader.raw("num_experts") or 8)
            picked = reader.integer("num_experts_per_tok", 2)
            inner, normalized = reader.integer("intermediate_size"), True
        case ExpertLayout.QWEN3:
            count = reader.count("num_experts", reader.raw("num_local_experts") or 128)
            picked = reader.integer("num_experts_per_tok", 8)
            inner = reader.integer("moe_intermediate_size", 768)
            normalized = reader.boolean("norm_topk_prob", False)
    if picked > count:
        raise reader.error("num_experts_per_tok", f"must be {count} or less, not {picked}")
    return ExpertsConfig(traits.experts, count, picked, inner, normalized)


def _routes(reader: JsonReader, traits: Traits, index: int) -> bool:
    """Whether a layer has experts. In Qwen3-MoE, some layers may have one dense MLP instead."""
    if traits.experts is not ExpertLayout.QWEN3:
        return traits.experts is not None
    step = reader.integer("decoder_sparse_step", 1)
    return index not in reader.integers("mlp_only_layers") and (index + 1) % step == 0
