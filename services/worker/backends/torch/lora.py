"""LoRA in plain torch. Rows are multiplied by A and B of their adapter, adapter by adapter, or all
adapters at once if torch can multiply grouped matrices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.kernels import Linear
from services.worker.backends.lora import (
    PARTS,
    LayerDeltas,
    LoraFactors,
    LoraLayer,
    LoraRows,
    stacked,
)

MakeLinear = Callable[[torch.Tensor], Linear]


@dataclass(frozen=True, slots=True)
class _Part:
    """An adapter's A and B as projections, and the output columns to which they add."""

    a: Linear
    b: Linear
    columns: slice


class TorchLora:
    """A PackedLora. `layers` maps, for each layer, names of projections to the adapter's parts."""

    def __init__(self, layers: Sequence[LoraLayer], linear: MakeLinear) -> None:
        self.num_bytes = sum(
            tensor.nbytes
            for layer in layers
            for part in PARTS
            for factors in getattr(layer, part)
            for tensor in (factors.a, factors.b)
        )
        self.layers = [
            {part: [_packed(one, linear) for one in getattr(layer, part)] for part in PARTS}
            for layer in layers
        ]


def _packed(factors: LoraFactors, linear: MakeLinear) -> _Part:
    columns = slice(factors.first, factors.first + len(factors.b))
    return _Part(linear(factors.a), linear(factors.b), columns)


class TorchLoraStep:
    """A LoraStep that multiplies adapter by adapter. For `padded_rows` see Kernels."""

    def __init__(self, rows: LoraRows, padded_rows: Callable[[int], int]) -> None:
        indexes = rows.device.upload(rows.rows.astype(np.int64))
        self._rows = indexes.tensor_split(rows.starts[1:-1].tolist())
        self._adapters = [one for one in rows.adapters if isinstance(one, TorchLora)]
        assert len(self._adapters) == len(rows.adapters)
        self._padded_rows = padded_rows

    def layer(self, index: int) -> LayerDeltas:
        return LayerDeltas(**{part: self._delta(index, part) for part in PARTS})

    def _delta(self, index: int, part: str) -> "_ByAdapter | None":
        found = [
            (rows, adapter.layers[index][part])
            for rows, adapter in zip(self._rows, self._adapters, strict=True)
            if adapter.layers[index][part]
        ]
        return _ByAdapter(found, self._padded_rows) if found else None


@dataclass(frozen=True, slots=True)
class _ByAdapter:
    adapters: list[tuple[torch.Tensor, list[_Part]]]
    padded_rows: Callable[[int], int]

    def added_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for rows, parts in self.adapters:
            count = len(rows)
            theirs = F.pad(x[rows], (0, 0, 0, self.padded_rows(count) - count))
            for part in parts:
                product[rows, part.columns] += part.b(part.a(theirs))[:count]
        return product


class GroupedLora:
    """A PackedLora with one A and one B for all columns of a projection, in each layer. LoRA ranks
    are padded to a multiple of 16, because rows of grouped matrices must be aligned to 16 bytes.
    """

    def __init__(self, layers: Sequence[LoraLayer], columns: dict[str, int]) -> None:
        """`columns` maps names of projections to their numbers of output columns."""
        self.layers = [
            {
                part: _rounded(stacked(getattr(layer, part), columns[part]))
                for part in PARTS
                if getattr(layer, part)
            }
            for layer in layers
        ]

    @property
    def num_bytes(self) -> int:
        factors = (one for layer in self.layers for one in layer.values())
        return sum(one.a.nbytes + one.b.nbytes for one in factors)


def _rounded(factors: LoraFactors) -> LoraFactors:
    missing = -len(factors.a) % 16
    a, b = F.pad(factors.a, (0, 0, 0, missing)), F.pad(factors.b, (0, missing))
    return LoraFactors(a, b, factors.first)


class GroupedLoraStep:
    """A LoraStep with grouped products. At their first use, the weights of the step's adapters are
    stacked. The next step reuses the stacks if it has the same adapters.
    """

    def __init__(self, rows: LoraRows, before: "GroupedLoraStep | None") -> None:
        self._adapters = [one for one in rows.adapters if isinstance(one, GroupedLora)]
        assert len(self._adapters) == len(rows.adapters)
        same = before is not None and before._adapters == self._adapters
        self._stacks: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor] | None] = (
            before._stacks if same and before is not None else {}
        )
        self._of_rows = rows

    def layer(self, index: int) -> LayerDeltas:
        return LayerDeltas(**{part: self._delta(index, part) for part in PARTS})

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self._of_rows.device.upload(self._of_rows.rows.astype(np.int64))

    @cached_property
    def _ends(self) -> torch.Tensor:
        return self._of_rows.device.upload(self._of_rows.starts[1:])

    def _delta(self, index: int, part: str) -> "_Grouped | None":
        key = index, part
        if key not in self._stacks:
            self._stacks[key] = self._stack(index, part)
        stack = self._stacks[key]
        return None if stack is None else _Grouped(self._rows, self._ends, *stack)

    def _stack(self, index: int, part: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the transposes of A, [adapters, in, r], and of B, [adapters, r, out]. They are
        zero for adapters that add nothing to this projection, and beyond an adapter's own LoRA
        rank.
        """
        found = [adapter.layers[index].get(part) for adapter in self._adapters]
        some = [one for one in found if one is not None]
        if not some:
            return None
        rank, (columns, _), depth = max(len(x.a) for x in some), some[0].b.shape, some[0].a.shape[1]
        a = some[0].a.new_zeros(len(found), rank, depth)
        b = some[0].b.new_zeros(len(found), columns, rank)
        for number, one in enumerate(found):
            if one is not None:
                a[number, : len(one.a)] = one.a
                b[number, :, : len(one.a)] = one.b
        return a.transpose(1, 2), b.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """A Delta with grouped products. `rows` are grouped by adapter. Group i ends at `ends[i]`."""

    rows: torch.Tensor
    ends: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def added_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        inside = F.grouped_mm(x[self.rows], self.a, offs=self.ends)
        return product.index_add_(0, self.rows, F.grouped_mm(inside, self.b, offs=self.ends))
