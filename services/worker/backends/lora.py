"""What adapters add to the projections of a decoder: B (A x) for a row x of the input, with A and B
of the adapter of the row's request (Hu et al., LoRA).
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
    """What an adapter adds to columns of a projection's output, from `first` on: `a` [r, in] and
    `b` [columns, r], by whose scale `b` is multiplied already.
    """

    a: torch.Tensor
    b: torch.Tensor
    first: int


Factors = tuple[LoraFactors, ...]


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """What an adapter adds to the projections of a layer, each by its name in LayerWeights; without
    factors nothing. `gate_up` has the gates' columns first, then those of the values.
    """

    qkv: Factors = ()
    output: Factors = ()
    gate_up: Factors = ()
    down: Factors = ()


PARTS = tuple(part.name for part in fields(LoraLayer))
"""The projections that adapters add to."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Columns of a projection's output before gating, its depth, and whether it is gated."""

    columns: int
    depth: int
    is_gated: bool = False


class PackedLora(Protocol):
    """An adapter as kernels need it."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Which rows of a step have which adapter: `rows[starts[i] : starts[i + 1]]`, rising, have
    `adapters[i]`; others of the `num_rows` have none. `device`: where the step is computed.
    """

    adapters: tuple[PackedLora, ...]
    rows: Int32Array
    starts: Int32Array
    num_rows: int
    device: torch.device


class Delta(Protocol):
    """What the adapters of a step add to one projection of the same kernels."""

    def added_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The product [n, out] of x [n, in], which may be overwritten, with what is added."""


@dataclass(frozen=True, slots=True)
class LayerDeltas:
    """What the adapters of a step add to the projections of a layer; None for nothing."""

    qkv: Delta | None = None
    output: Delta | None = None
    gate_up: Delta | None = None
    down: Delta | None = None


NO_DELTAS = LayerDeltas()


class LoraStep(Protocol):
    """The adapters of a step."""

    def layer(self, index: int) -> LayerDeltas:
        """What they add to the projections of a layer."""


def stacked(factors: Factors, columns: int) -> LoraFactors:
    """Several factors as one for all columns, whose B is zero where a factor adds nothing."""
    if len(factors) == 1 and len(factors[0].b) == columns:
        return factors[0]
    a = torch.cat([one.a for one in factors])
    b = a.new_zeros(columns, len(a))
    for one, begin in zip(factors, _begins(factors), strict=True):
        b[one.first : one.first + len(one.b), begin : begin + len(one.a)] = one.b
    return LoraFactors(a, b, 0)


def _begins(factors: Factors) -> Iterator[int]:
    """Where the rows of each A begin if they are stacked."""
    begin = 0
    for one in factors:
        yield begin
        begin += len(one.a)
