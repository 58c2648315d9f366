"""Keys and values in 8 bits, with a scale for each token and key head.

The elements of one head of a token are stored as codes, integers from -127 to 127, and a scale in
float32. The scale is the largest magnitude of the elements divided by 127. So the error of an
element is at most half the scale. Codes and scale depend only on this head of this token. vLLM has
the same format, `int8_per_token_head`.
"""

import torch

from services.worker.backends.quantized import quantized_rows

_SCALE_BYTES = 4
_VECTOR = 16


def bytes_of_head(head_dim: int) -> int:
    """The bytes of one head of a token: codes, padded to a multiple of 16 bytes, and the scale."""
    return -(-head_dim // _VECTOR) * _VECTOR + _SCALE_BYTES


def coded(heads: torch.Tensor) -> torch.Tensor:
    """Encodes heads [..., head_dim] to int8 [..., bytes_of_head]: codes, zeros, then the scale's
    bytes. The scale of a head that is not finite is NaN.
    """
    codes, scales = quantized_rows(heads)
    dim = heads.shape[-1]
    stored = torch.zeros(*heads.shape[:-1], bytes_of_head(dim), dtype=torch.int8)
    stored[..., :dim] = codes
    stored[..., -_SCALE_BYTES:] = scales.view(torch.int8)
    return stored


def decoded(stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Decodes the result of `coded`: [..., bytes_of_head] to [..., head_dim]."""
    scales = stored[..., -_SCALE_BYTES:].view(torch.float32)
    return (stored[..., :head_dim] * scales).to(dtype)
