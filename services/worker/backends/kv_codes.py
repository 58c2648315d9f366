"""Keys and values in 8 bits, with a scale for each token and key head.

A head of a token is whole numbers from -127 to 127, its codes, times a scale in float32: the
largest magnitude of its elements over 127. So an element is off by at most half the scale, and
codes and scale follow from that token's head alone. vLLM has the same under the same name.
"""

import torch

from services.worker.backends.quantized import quantized_rows

_SCALE_BYTES = 4
_VECTOR = 16


def bytes_of_head(head_dim: int) -> int:
    """Bytes of a token's codes of one head, filled up to whole vectors, and of their scale."""
    return -(-head_dim // _VECTOR) * _VECTOR + _SCALE_BYTES


def coded(heads: torch.Tensor) -> torch.Tensor:
    """Heads [..., head_dim] as int8 [..., bytes_of_head]: codes, zeros, then the scale's bytes. A
    head that is not finite gets the scale NaN.
    """
    codes, scales = quantized_rows(heads)
    dim = heads.shape[-1]
    stored = torch.zeros(*heads.shape[:-1], bytes_of_head(dim), dtype=torch.int8)
    stored[..., :dim] = codes
    stored[..., -_SCALE_BYTES:] = scales.view(torch.int8)
    return stored


def decoded(stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `coded`, [..., bytes_of_head] -> [..., head_dim]."""
    scales = stored[..., -_SCALE_BYTES:].view(torch.float32)
    return (stored[..., :head_dim] * scales).to(dtype)
