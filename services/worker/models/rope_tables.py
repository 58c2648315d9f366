"""Frequencies and tables of rotary position embeddings."""

import math

import torch

from services.worker.models.rope import RopeConfig, RopeType


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Returns frequencies, float32 [head_dim / 2], and the factor of cos and sin.

    With RopeType.DYNAMIC, frequencies depend on the sequence length. Cached keys must not change
    when a sequence grows, so the base is computed from `max_model_len` for all sequences. If
    `max_model_len` is at most max_position_embeddings, the base is not scaled.
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
    """Returns cos and sin of all positions, two tensors [max_model_len, head_dim / 2]."""
    frequencies, factor = inverse_frequencies(rope, head_dim, max_model_len)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Interpolates long wavelengths, keeps short ones, and blends both in between."""
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
    """Keeps fast rotations and interpolates slow ones, with a linear ramp between them."""

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
