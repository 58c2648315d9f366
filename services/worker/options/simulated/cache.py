"""The KV cache of the simulated device. It has one key and one value of 8 bytes per token.

Attention of layer 0 stores one number for each of a step's tokens as its key, and attention of
layer 1 stores one as its value. For each token, both layers return a sum over the attention windows
of all layers in the shape. A window contributes its tokens' numbers, each times a factor for its
position. All numbers are read through the block tables, after the step's own numbers were
stored. Therefore a wrong block, a block that was freed too early, or a token that was not computed
changes the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.backends.arrays import Int32Array, UInt64Array
from services.worker.backends.attention import AttentionShape, LayerAttention, Rotation, StepLayout
from services.worker.options.simulated.hashing import PositionFactors

_LAYER = np.uint64(1 << 56)
"""The difference between a token's numbers in two successive layers of the AttentionShape."""


class SimulatedCache:
    """A PagedAttention with one page, [2, num_blocks, tokens of the largest block]. KV-cache groups
    with smaller blocks leave the end of each block unused.

    A group stores the numbers of its first layer, from which the numbers of its other layers are
    computed. Therefore the sums do not depend on the division into groups.
    """

    def __init__(self, shape: AttentionShape) -> None:
        page = torch.zeros(2, shape.num_blocks, max(shape.block_sizes), dtype=torch.int64)
        self.pages = [page]
        self.planes: UInt64Array = page.numpy().view(np.uint64)
        self.groups = shape.layer_groups
        self.windows = [layer.window for layer in shape.layers]
        self.factors = PositionFactors()

    def begin_step(self, layouts: Sequence[StepLayout]) -> LayerAttention:
        return SimulatedStep(self, layouts)

    def zero_blocks(self, block_ids: Int32Array) -> None:
        self.planes[:, block_ids] = 0


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A LayerAttention with two layers. Uses only `key`, int64 [n], and returns int64 [n]."""

    cache: SimulatedCache
    layouts: Sequence[StepLayout]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        numbers: UInt64Array = key.numpy().view(np.uint64)
        plane, sums = self.cache.planes[layer], np.zeros_like(numbers)
        for group, layout in zip(self.cache.groups, self.layouts, strict=True):
            positions, size = layout.positions, layout.block_size
            blocks = layout.tables[layout.token_rows, positions // size]
            plane[blocks, positions % size] = numbers + np.uint64(group[0] + 1) * _LAYER
        for group, layout in zip(self.cache.groups, self.layouts, strict=True):
            for member in group:
                more = np.uint64(member - group[0]) * _LAYER
                self._add_sums(plane, layout, self.cache.windows[member], more, sums)
        return torch.from_numpy(sums.view(np.int64))

    def _add_sums(
        self,
        plane: UInt64Array,
        layout: StepLayout,
        window: int | None,
        more: np.uint64,
        sums: UInt64Array,
    ) -> None:
        """Adds the sums of a layer, whose numbers are the stored numbers plus `more`, to `sums`."""
        factors = self.cache.factors.up_to(int(layout.seq_lens.max()))
        starts, size = layout.query_starts.tolist(), layout.block_size
        for index, (row, length) in enumerate(
            zip(layout.rows.tolist(), layout.seq_lens.tolist(), strict=True)
        ):
            begin, end = starts[index], starts[index + 1]
            seen = 0 if window is None else max(0, length - (end - begin) - window + 1)
            first = seen // size
            blocks = layout.tables[row, first : -(-length // size)]
            held = plane[blocks, :size].reshape(-1)[: length - first * size]
            terms = (held + more if more else held) * factors[first * size : length]
            if end - begin == 1:
                sums[begin:end] += np.add.reduce(terms[seen - first * size :])
            else:
                sums[begin:end] += _sums_of_last(terms, end - begin, window)


def _sums_of_last(terms: UInt64Array, count: int, window: int | None) -> UInt64Array:
    """For each of the last `count` terms, returns the sum of the window that ends with the term."""
    totals = np.zeros(len(terms) + 1, np.uint64)
    np.add.accumulate(terms, out=totals[1:])
    sums: UInt64Array = totals[-count:]
    if window is not None:
        first_seen = np.arange(len(terms) - count, len(terms)) + 1 - window
        sums = sums - totals[np.maximum(first_seen, 0)]
    return sums
