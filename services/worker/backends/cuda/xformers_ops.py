"""xFormers' biases and operators. No other module imports xFormers.

Operators are chosen explicitly, because xFormers' own choice rejects or miscomputes some of the
calls that serving needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from xformers.ops import fmha
from xformers.ops.fmha import attn_bias, common, flash3, triton_splitk

from services.worker.backends.attention import AttentionLayer

Bias = Any
"""xFormers' description of the keys of each query. It is built once a step, for all layers."""

Operator = type[Any]

FLASH: Operator = flash3.FwOp
"""FlashAttention 3, for lanes of any number of queries."""

FLASH_HEAD_DIMS = (64, 128, 256)
"""Head sizes that both the split-K kernel and FlashAttention 3 support."""

_LARGEST_TILE = 64
_TILE_ELEMENTS = 16384
"""Elements in a tile of keys. Tiles of keys and values fit into 99 KiB of shared memory."""


def built_with_cuda() -> bool:
    """Whether xFormers found its CUDA library. Without it xFormers rejects all CUDA tensors."""
    return bool(common._built_with_cuda)


def has_flash() -> bool:
    """Whether FlashAttention 3 is available: its library is found, and it supports this GPU."""
    if not FLASH.is_available():
        return False
    oldest, newest = FLASH.CUDA_MINIMUM_COMPUTE_CAPABILITY, FLASH.CUDA_MAXIMUM_COMPUTE_CAPABILITY
    return bool(oldest <= torch.cuda.get_device_capability() <= newest)


@dataclass(frozen=True, slots=True)
class PagedOps:
    """Attention calls over pools of pages, for layers with equal attention parameters.

    A pool is [num_blocks * block_size, num_kv_heads, head_dim]. `kernel` is the split-K operator,
    or None for xFormers' own. Tests pass an operator that also runs on the CPU.
    """

    layer: AttentionLayer
    block_size: int
    kernel: Operator | None = None

    def padded_bias(
        self, num_queries: Sequence[int], ends: Sequence[int], block_tables: torch.Tensor
    ) -> Bias:
        """Returns a bias with which the last `num_queries[i]` tokens of lane i attend causally to
        the keys [0, ends[i]). `block_tables`: int32 [num_lanes, width], on the device of the call.
        """
        kind = attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
        return kind.from_seqlens(
            num_queries, ends, block_tables, self.block_size, device=block_tables.device
        )

    def gappy_bias(
        self,
        num_queries: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: torch.Tensor,
    ) -> Bias:
        """Like `padded_bias`, but lane i attends to the keys [starts[i], starts[i] + lengths[i]).

        The bias is constructed field by field. The class's own `from_seqlens` cannot be called, and
        `make_paged` numbers the keys of all lanes consecutively, which exceeds 32 bits.
        """
        device = block_tables.device
        ranges = attn_bias._GappySeqInfo.from_seqlens_gappy(
            [*starts, 0], lengths, True, device=device
        )
        return attn_bias.PagedBlockDiagonalCausalWithOffsetGappyKeysMask(
            attn_bias._SeqLenInfo.from_seqlens(num_queries, device=device),
            ranges,
            block_tables,
            self.block_size,
        )

    def split_k(self, num_splits: int) -> Operator:
        """Returns the split-K operator. Its tiles of keys divide a page, as the kernel requires."""
        tile = min(_LARGEST_TILE, self.block_size, _TILE_ELEMENTS // self.layer.head_dim)
        kernel = self.kernel or triton_splitk.FwOp
        operator: Operator = kernel.get_operator(num_splits, block_n=tile)
        return operator

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: Bias,
        operator: Operator,
    ) -> torch.Tensor:
        """Maps the queries [n, num_heads, head_dim] of all lanes to [n, num_heads, head_dim]."""
        output: torch.Tensor = fmha.memory_efficient_attention_forward(
            *self._grouped(query, keys, values), attn_bias=bias, scale=self.layer.scale, op=operator
        )
        return output.reshape(query.shape)

    def attend_partly(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: Bias,
        operator: Operator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `attend`, but returns the output in float32, and the log-sum-exp of each query's
        scores, float32 [n, num_heads].
        """
        output, normalizers = fmha.memory_efficient_attention_partial(
            *self._grouped(query, keys, values),
            attn_bias=bias,
            scale=self.layer.scale,
            op=operator,
            output_dtype=torch.float32,
        )
        normalizers = normalizers[0].flatten(0, 1).transpose(0, 1)
        return output.reshape(query.shape), normalizers.to(torch.float32)

    def _grouped(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups, head_dim = self.layer.num_kv_heads, self.layer.head_dim
        repeats = self.layer.num_heads // groups
        keys, values = (
            pool.view(1, -1, groups, 1, head_dim).expand(-1, -1, -1, repeats, -1)
            for pool in (keys, values)
        )
        return query.view(1, -1, groups, repeats, head_dim), keys, values
