"""LoRA deltas of a decoder's projections. The delta of an input row x is B (A x), with the matrices
A and B of the adapter that the row's request uses (Hu et al., LoRA).
"""

from dataclasses import dataclass, fields
from typing import Protocol

import torch

from services.worker.backends.arrays import Int32Array
from services.worker.backends.device import Device


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """An adapter's factors for consecutive output columns of a projection, from column `first` on:
    `a` [r, in] and `b` [columns, r]. `b` is already multiplied by the adapter's scale.
    """

    a: torch.Tensor
    b: torch.Tensor
    first: int


Factors = tuple[LoraFactors, ...]


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """An adapter's factors for the projections of a layer, named as in LayerWeights. A projection
    with an empty field is unchanged. In `gate_up` the gates' columns precede the values' columns.
    """

    qkv: Factors = ()
    output: Factors = ()
    gate_up: Factors = ()
    down: Factors = ()


PARTS = tuple(part.name for part in fields(LoraLayer))
"""The projections that adapters add to."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The shape of a projection: its number of output columns before gating, its number of input
    features (depth), and whether it is gated.
    """

    columns: int
    depth: int
    is_gated: bool = False


class PackedLora(Protocol):
    """An adapter in the form that kernels use."""

    @property
    def num_bytes(self) -> int:
        """Memory of the adapter, in bytes."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The rows of a step, grouped by adapter. Rows `rows[starts[i] : starts[i + 1]]`, in ascending
    order, use `adapters[i]`. All other rows, of `num_rows` in total, use no adapter. The step is
    computed on `device`.
    """

    adapters: tuple[PackedLora, ...]
    rows: Int32Array
    starts: Int32Array
    num_rows: int
    device: Device


class Delta(Protocol):
    """The sum of a step's adapters in one projection. The same kernels must have created the
    projection.
    """

    def added_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the deltas of x [n, in] to the product [n, out], which may be overwritten."""


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """The deltas of a step's adapters in the projections of a layer. None means no delta."""

    qkv: Delta | None = None
    output: Delta | None = None
    gate_up: Delta | None = None
    down: Delta | None = None


NO_DELTAS = LayerDeltas()


class LoraStep(Protocol):
    def layer(self, index: int) -> LayerDeltas:
        """Returns the deltas in the projections of a layer."""


def stacked(factors: Factors, columns: int) -> LoraFactors:
    """Combines factors into one for all output columns. B is zero for columns without a factor."""
    if len(factors) == 1 and len(factors[0].b) == columns:
        return factors[0]
    a = torch.cat([one.a for one in factors])
    b, begin = a.new_zeros(columns, len(a)), 0
    for one in factors:
        b[one.first : one.first + len(one.b), begin : begin + len(one.a)] = one.b
        begin += len(one.a)
    return LoraFactors(a, b, 0)
