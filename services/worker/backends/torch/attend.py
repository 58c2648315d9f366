"""One attention call in torch, and what makes its rows independent of how many there are.

The libraries below torch choose a way to multiply by the number of rows: one or two rows are summed
in another order than many. With four rows and more, in multiples of four, the libraries that were
tried agree (oneDNN 3 and MKL 2024 on AVX2 and AVX-512); `row_multiple` tries those of this machine.
"""

import functools

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.attention import AttentionLayer

MOST_ROWS = 128
"""Most queries of one head in a call, padding included."""

_FEW_ROWS, _MANY_ROWS = 4, 32
_PROBED_ROWS = (4, 8, 20, 32, 36, 64, MOST_ROWS)
_PROBED_LENGTHS = (64, 192, 512, 1024)
_HEADS = 2


def attend_alike(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    layer: AttentionLayer,
) -> torch.Tensor:
    """As `attend`, the same bits for any number of threads.

    A single head is computed twice: the libraries would spread it over threads, and sum in an
    order that depends on their number.
    """
    if query.shape[0] * query.shape[1] > 1:
        return attend(query, keys, values, mask, layer)
    query, keys, values = (x.expand(2, -1, -1, -1) for x in (query, keys, values))
    if mask.dim() == query.dim():
        mask = mask.expand(2, -1, -1, -1)
    return attend(query, keys, values, mask, layer)[:1]


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    layer: AttentionLayer,
) -> torch.Tensor:
    """Attention of [groups, heads, n, head_dim] over [groups, heads, keys, head_dim].

    The mask is added to the scores. Computed operation by operation if scores are capped.
    """
    if layer.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=layer.scale)
    scores = (query @ keys.transpose(-1, -2)).float() * (layer.scale / layer.softcap)
    scores.tanh_().mul_(layer.softcap)
    scores += mask
    return torch.softmax(scores, dim=-1).to(values.dtype) @ values


@functools.cache
def row_multiple(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """The multiple to which the queries of a call on the CPU are padded, so that a row is the same
    whatever their number.

    Found by trying: if the rows of several numbers differ, every call gets blocks of as many rows
    as torch's kernel takes at once.
    """
    random = torch.Generator().manual_seed(0)

    def numbers(length: int) -> torch.Tensor:
        return torch.randn(1, _HEADS, length, layer.head_dim, generator=random).to(dtype)

    for length in _PROBED_LENGTHS:
        query, keys, values = numbers(MOST_ROWS), numbers(length), numbers(length)
        mask = torch.zeros(MOST_ROWS, length, dtype=dtype)
        mask[:, length - length // 3 :] = -torch.inf
        whole = attend_alike(query, keys, values, mask, layer)
        for rows in _PROBED_ROWS:
            part = attend_alike(query[:, :, :rows], keys, values, mask[:rows], layer)
            if not torch.equal(part, whole[:, :, :rows]):
                return _MANY_ROWS
    return _FEW_ROWS
