"""Rotary embedding and one attention call in torch.

The libraries that torch uses choose a multiplication method by the number of rows (here queries).
The sums of one or two rows are in another order than the sums of many. With multiples of four rows,
the tested libraries return the same bits for a row (oneDNN 3 and MKL 2024 on AVX2 and AVX-512).
`row_multiple` tests the libraries of this machine.
"""

import functools

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.attention import AttentionLayer, Rotation

MOST_ROWS = 128
"""Maximum number of queries of one head in a call, including padding."""

_FEW_ROWS, _MANY_ROWS = 4, 32
_PROBED_ROWS = (4, 8, 20, 32, 36, 64, MOST_ROWS)
_PROBED_LENGTHS = (64, 192, 512, 1024)
_HEADS = 2
_TILE_WIDTH = 32


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    layer: AttentionLayer,
    *,
    alike: bool = False,
) -> torch.Tensor:
    """Attention of queries [groups, heads, n, head_dim] over keys and values [groups, heads, keys,
    head_dim].

    The mask is added to the scores. Scores with a softcap are computed without torch's fused
    operation. With `alike`, the bits do not depend on the number of threads. A single head is then
    computed twice, because the libraries would divide it among threads, and the order of sums would
    depend on the number of threads. Heads in bfloat16 are padded with zeros to a multiple of
    _TILE_WIDTH, because the tile registers of some processors (AMX) sum an incomplete tile in
    another order.
    """
    head_dim = query.shape[-1]
    if alike and query.dtype is torch.bfloat16 and head_dim % _TILE_WIDTH:
        missing = (0, -head_dim % _TILE_WIDTH)
        query, keys, values = (F.pad(x, missing) for x in (query, keys, values))
    is_doubled = alike and query.shape[0] * query.shape[1] == 1
    if is_doubled:
        query, keys, values = (x.expand(2, -1, -1, -1) for x in (query, keys, values))
        if mask.dim() == query.dim():
            mask = mask.expand(2, -1, -1, -1)
    if layer.softcap is None:
        output = F.scaled_dot_product_attention(query, keys, values, mask, scale=layer.scale)
    else:
        scores = (query @ keys.transpose(-1, -2)).float() * (layer.scale / layer.softcap)
        scores.tanh_().mul_(layer.softcap)
        scores += mask
        output = torch.softmax(scores, dim=-1).to(values.dtype) @ values
    return (output[:1] if is_doubled else output)[..., :head_dim]


@functools.cache
def row_multiple(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """Returns the number to a multiple of which the queries of each call are padded, with
    `batch_invariant` on the CPU. A query's result then does not depend on how many queries its call
    has.

    Trial computations determine the number. If their results depend on the number of queries, it is
    the number of rows that torch's kernel computes at once.
    """
    random = torch.Generator().manual_seed(0)

    def numbers(length: int) -> torch.Tensor:
        return torch.randn(1, _HEADS, length, layer.head_dim, generator=random).to(dtype)

    for length in _PROBED_LENGTHS:
        query, keys, values = numbers(MOST_ROWS), numbers(length), numbers(length)
        mask = torch.zeros(MOST_ROWS, length, dtype=dtype)
        mask[:, length - length // 3 :] = -torch.inf
        whole = attend(query, keys, values, mask, layer, alike=True)
        for rows in _PROBED_ROWS:
            part = attend(query[:, :, :rows], keys, values, mask[:rows], layer, alike=True)
            if not torch.equal(part, whole[:, :, :rows]):
                return _MANY_ROWS
    return _FEW_ROWS


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
