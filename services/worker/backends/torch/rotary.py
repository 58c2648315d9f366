"""Rotary embedding in plain torch operations."""

import torch

from services.worker.backends.attention import Rotation


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates [n, heads, head_dim] by each token's angles. The result is new and contiguous."""
    cos, sin = rotation.cos.unsqueeze(1), rotation.sin.unsqueeze(1)
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    output = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    torch.mul(first, cos, out=output[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=output[..., half : 2 * half]).addcmul_(first, sin)
    output[..., 2 * half :] = heads[..., 2 * half :]
    return output
