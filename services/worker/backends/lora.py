"""LoRA deltas of a decoder's projections: B (A x) for an input row x, with the A and B of the
adapter of the row's request (Hu et al., LoRA).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """An adapter's factors for columns of a projection's output, from `first` on: `a` [r, in] and
    `b` [columns, r]. `b` is already multiplied by the adapter's scale.
    """

    a: torch.Tensor
    b: torch.Tensor
    first: int


Factors = tuple[LoraFactors, ...]


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """An adapter's factors for the projections of a layer, named as in LayerWeights; empty: nothing
    is added. In `gate_up` the gates' columns precede the values' columns.
    """

    qkv: Factors = ()
    output: Factors = ()
    gate_up: Factors = ()
    down: Factors = ()


PARTS = tuple(part.name for part in fields(LoraLayer))
"""The projections that adapters add to."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Output columns of a projection before gating, its depth, and whether it is gated."""

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
    """The rows of a step, by adapter. Rows `rows[starts[i] : starts[i + 1]]`, ascending, use
    `adapters[i]`; the other rows of `num_rows` use none. `device`: where the step is computed.
    """

    adapters: tuple[PackedLora, ...]
    rows: Int32Array
    starts: Int32Array
    num_rows: int
    device: torch.device


class Delta(Protocol):
    """The additions of a step's adapters to one projection of the same kernels."""

    def added_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds the deltas of x [n, in] to the product [n, out], which may be overwritten."""


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """The deltas of a step's adapters in the projections of a layer; None: nothing is added."""

    qkv: Delta | None = None
    output: Delta | None = None
    gate_up: Delta | None = None
    down: Delta | None = None


NO_DELTAS = LayerDeltas()


class LoraStep(Protocol):
    """The adapters of a step."""

    def layer(self, index: int) -> LayerDeltas:
        """The deltas in the projections of a layer."""


def stacked(factors: Factors, columns: int) -> LoraFactors:
    """Combines factors into one for all columns. B is zero where a factor adds nothing."""
    if len(factors) == 1 and len(factors[0].b) == columns:
        return factors[0]
    a = torch.cat([one.a for one in factors])
    b = a.new_zeros(columns, len(a))
    for one, begin in zip(factors, _begins(factors), strict=True):
        b[one.first : one.first + len(one.b), begin : begin + len(one.a)] = one.b
    return LoraFactors(a, b, 0)


def _begins(factors: Factors) -> Iterator[int]:
    """The first row of each A if they are stacked."""
    begin = 0
    for one in factors:
        yield begin
        begin += len(one.a)
