"""Rotary position embeddings, and how checkpoints extend them to longer sequences.

Rotary embeddings are from Su et al., RoFormer. The extensions are: linear (Chen et al., position
interpolation), dynamic (the "NTK-aware" change of base), YaRN (Peng et al.), and Llama 3 (smoothed
interpolation by wavelength). Settings are read from `rope_parameters` in config.json, or from
`rope_theta` and `rope_scaling`.
"""

import enum
from dataclasses import dataclass, replace

from services.worker.models.errors import UnsupportedModel
from services.worker.models.files.json_file import JsonReader


class RopeType(enum.Enum):
    """How frequencies are scaled for longer sequences."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a checkpoint. Fields that its type does not use have default values.

    `max_position_embeddings`: the value in config.json. `original_max_position_embeddings`: the
    length with which the model was trained, before scaling. `attention_factor`: None means that it
    is derived from `factor`.
    """

    rope_type: RopeType
    theta: float
    max_position_embeddings: int
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence that the scaled embedding supports, in tokens."""
        match self.rope_type:
            case RopeType.LINEAR | RopeType.DYNAMIC:
                return int(self.max_position_embeddings * self.factor)
            case RopeType.YARN:
                stretched = int(self.original_max_position_embeddings * self.factor)
                return max(stretched, self.max_position_embeddings)
            case _:
                return self.max_position_embeddings


def read_ropes(
    config: JsonReader, *, theta: float, local_theta: float | None
) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotary embeddings of full-attention layers and of layers with an attention
    window, from config.json. Raises ModelConfigError.

    `theta`: the default base. `local_theta`: the default of `rope_local_base_freq`, the base of the
    embedding in layers with a window, whose frequencies are not scaled. If `local_theta` is None,
    all layers have the same embedding. `rope_parameters` may also have an entry for each type of
    layer. If `rope_scaling` is also present, it replaces `rope_parameters` except their base,
    because users add `rope_scaling` to extend the context of a model.
    """
    stored = config.nested("rope_parameters")
    values = config.nested("rope_scaling") or stored
    full = values.nested("full_attention") or values
    sliding = values.nested("sliding_attention") or stored.nested("sliding_attention")
    kept = (stored.nested("full_attention") or stored).positive_float("rope_theta", theta)
    rope = _read_rope(config, full, config.positive_float("rope_theta", kept))
    if local_theta is None and not sliding:
        return rope, rope
    local_theta = config.positive_float("rope_local_base_freq", local_theta or theta)
    return rope, _read_rope(config, sliding, local_theta)


def _read_rope(config: JsonReader, values: JsonReader, theta: float) -> RopeConfig:
    length = config.integer("max_position_embeddings", 2048)
    name = values.text("rope_type", values.text("type", "default"))
    try:
        rope_type = RopeType(name)
    except ValueError:
        known = ", ".join(kind.value for kind in RopeType)
        raise UnsupportedModel(
            config.path, f"rope_type {name!r} is not supported; supported are {known}"
        ) from None
    outer_share = config.positive_float("partial_rotary_factor", 1.0)
    if values.positive_float("partial_rotary_factor", outer_share) != 1:
        raise UnsupportedModel(config.path, "partial_rotary_factor other than 1 is not supported")
    theta = values.positive_float("rope_theta", theta)
    outside = config.integer("original_max_position_embeddings", length)
    original = values.integer("original_max_position_embeddings", outside)
    plain = RopeConfig(rope_type, theta, length, original)
    return plain if rope_type is RopeType.DEFAULT else _stretched(plain, values)


def _stretched(plain: RopeConfig, values: JsonReader) -> RopeConfig:
    ratio = plain.max_position_embeddings / plain.original_max_position_embeddings
    fallback = ratio if plain.rope_type is RopeType.YARN else None

    def optional(key: str) -> float | None:
        return values.positive_float(key) if key in values else None

    needed = None if plain.rope_type is RopeType.LLAMA3 else 1.0
    return replace(
        plain,
        factor=values.positive_float("factor", fallback),
        low_freq_factor=values.positive_float("low_freq_factor", needed),
        high_freq_factor=values.positive_float("high_freq_factor", needed and 4.0),
        beta_fast=values.positive_float("beta_fast", 32.0),
        beta_slow=values.positive_float("beta_slow", 1.0),
        truncate=values.boolean("truncate", True),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale") if values.raw("mscale") else None,
        mscale_all_dim=optional("mscale_all_dim") if values.raw("mscale_all_dim") else None,
    )
