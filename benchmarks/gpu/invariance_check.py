"""Checks that rows computed with --batch-invariant have the same bits in every batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention_check import Case
from services.worker.backends.attention import AttentionShape, StepLayout
from services.worker.backends.cuda.paged_attention import XformersPagedAttention
from services.worker.backends.device import Device

Part = tuple[int, int, int]
"""A sequence, and the range [first, end) of the positions that a step computes."""

ROWS = (1, 2, 7, 16, 63, 64, 65, 130)


def products_differ(
    device: Device, dtype: torch.dtype, width: int, out: int, *, bias: bool = False
) -> list[int]:
    """The batch sizes with which a row's product differs from the one in the largest batch."""
    from services.worker.backends.cuda.fixed_tiles import FixedTilesLinear  # noqa: PLC0415

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device.torch_device).to(dtype)

    linear = FixedTilesLinear(numbers(out, width), numbers(out) if bias else None)
    rows = numbers(max(ROWS), width)
    whole = linear(rows)
    return [count for count in ROWS if not torch.equal(linear(rows[-count:]), whole[-count:])]


class InvarianceCheck:
    """Sequences of fixed queries, keys and values. The constructor computes the attention of each
    sequence alone, in one step. A block table has room for `max_model_len` tokens and for the
    longest sequence.
    """

    def __init__(
        self,
        case: Case,
        device: Device,
        lengths: list[int],
        split_k: Any = None,
        *,
        max_model_len: int = 0,
        batch_invariant: bool = True,
    ) -> None:
        random = torch.Generator().manual_seed(0)
        self._case = case
        self._width = -(-max(*lengths, max_model_len) // case.block_size)
        self._heads = [
            [
                torch.randn(length, heads, case.head_dim, generator=random)
                .to(case.dtype)
                .to(device.torch_device)
                for length in lengths
            ]
            for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        ]
        num_blocks = len(lengths) * self._width + 1
        shape = AttentionShape(
            (case.layer,), case.block_size, num_blocks, case.dtype, device.torch_device
        )
        self._attention = XformersPagedAttention(
            shape, device, self._width, split_k, batch_invariant=batch_invariant
        )
        self._assign_blocks(seed=0)
        self._whole = [self._step([(row, 0, length)])[0] for row, length in enumerate(lengths)]

    def differing(self, steps: list[list[Part]]) -> list[tuple[int, int]]:
        """Computes the constructor's sequences again, cut into the parts of `steps`, with keys and
        values in other cache blocks.

        Returns, for each part that differs from the constructor's result, the sequence and its
        first differing token. In a step, parts of one token must precede other parts.
        """
        self._assign_blocks(seed=1)
        return [
            (row, begin + int((found != self._whole[row][begin:end]).any(1).int().argmax()))
            for parts in steps
            for (row, begin, end), found in zip(parts, self._step(parts), strict=True)
            if not torch.equal(found, self._whole[row][begin:end])
        ]

    def _assign_blocks(self, seed: int) -> None:
        num_blocks = len(self._heads[0]) * self._width
        blocks = np.random.default_rng(seed).permutation(num_blocks) + 1
        self._tables = blocks.reshape(-1, self._width).astype(np.int32)

    def _step(self, parts: list[Part]) -> list[torch.Tensor]:
        rows, begins, ends = (np.array(column, np.int32) for column in zip(*parts, strict=True))
        layout = StepLayout(
            num_decodes=int((ends - begins == 1).sum()),
            query_starts=np.cumsum([0, *(ends - begins)]).astype(np.int32),
            seq_lens=ends,
            rows=rows,
            tables=self._tables,
            block_size=self._case.block_size,
        )
        given = [
            torch.cat([heads[row][begin:end] for row, begin, end in parts]) for heads in self._heads
        ]
        output = self._attention.begin_step([layout])(0, given[0], given[1], given[2], None)
        return list(torch.split(output, (ends - begins).tolist()))
