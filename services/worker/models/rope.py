"""Rotary position embeddings, and how checkpoints stretch them to longer sequences.

Rotary embeddings: Su et al., RoFormer. Linear: Chen et al., position interpolation. Dynamic: the
"NTK-aware" change of base. YaRN: Peng et al. Llama 3: smoothed interpolation by wavelength.
Settings are read in both forms that checkpoints use: `rope_theta` beside `rope_scaling`, and
everything in `rope_parameters`.
"""

import enum
import math
from dataclasses import dataclass, replace

import torch

from services.worker.models.errors import UnsupportedModel
from services.worker.models.json_file import JsonReader


class RopeType(enum.Enum):
    """How frequencies are changed for longer sequences."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a checkpoint; fields that its type does not use hold their defaults.

    `max_position_embeddings` is config.json's; `original_max_position_embeddings` the length the
    model was trained at, before stretching. `attention_factor` None: derived from `factor`.
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
        """The longest sequence that the stretched embedding is made for."""
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
    """The rotary embedding of layers that see all tokens, and that of layers with a window, as
    config.json describes them. Raises ModelConfigError.

    `theta`: the base where none is given. `local_theta`: layers with a window have a base of their
    own, this or `rope_local_base_freq`, and are not stretched; None: one embedding for all.
    `rope_parameters` may also hold an entry for each type of layer.
    """
    values = config.nested("rope_parameters") or config.nested("rope_scaling")
    full, sliding = values.nested("full_attention"), values.nested("sliding_attention")
    if full or sliding:
        local = _read_rope(config, sliding, local_theta or theta)
        return _read_rope(config, full, theta), local
    rope = _read_rope(config, values, config.positive_float("rope_theta", theta))
    if local_theta is None:
        return rope, rope
    local_theta = config.positive_float("rope_local_base_freq", local_theta)
    return rope, _read_rope(config, JsonReader(config.path, {}), local_theta)


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
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Frequencies, float32 [head_dim / 2], and the factor that cos and sin are multiplied by.

    The dynamic kind depends on the sequence's length. Cached keys must not change when a sequence
    grows, so its base is fixed for `max_model_len`: the plain one up to max_position_embeddings.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.rope_type:
        case RopeType.DEFAULT:
            return plain, 1.0
        case RopeType.LINEAR:
            return plain / rope.factor, 1.0
        case RopeType.DYNAMIC:
            length = max(max_model_len, rope.max_position_embeddings)
            stretch = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1)
            return 1.0 / ((rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents), 1.0
        case RopeType.LLAMA3:
            return _llama3(rope, plain), 1.0
        case RopeType.YARN:
            return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)


def cos_sin_table(
    rope: RopeConfig,
    head_dim: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position below `max_model_len`: two [max_model_len, head_dim / 2]."""
    frequencies, factor = inverse_frequencies(rope, head_dim, max_model_len)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are interpolated, short ones kept, those between blended."""
    length = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    spread = rope.high_freq_factor - rope.low_freq_factor
    smooth = (length / wavelengths - rope.low_freq_factor) / spread
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(
        wavelengths > length / rope.low_freq_factor, plain / rope.factor, blended
    )
    return torch.where(wavelengths < length / rope.high_freq_factor, plain, stretched)


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A ramp over dimensions: fast rotations are kept, slow ones interpolated."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
