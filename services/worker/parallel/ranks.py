"""Collectives of the ranks that share a model, and the projections that are divided over them.

The division is Megatron-LM's (Shoeybi et al.): the projections into heads and into the inside of an
MLP are divided by columns, those out of them by rows, so that a layer has two sums over the ranks.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from services.worker.backends.kernels import Linear
from services.worker.backends.lora import Delta


class Ranks(Protocol):
    """The collectives of a group, on one rank. All ranks make the same calls in one order, with
    tensors of the same shape, and get the same bits.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, which may be overwritten. Where ranks are added one by one
        they are in rank order, so that a row's sum does not depend on the rows beside it.
        """

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[n, d] of each rank side by side, in rank order: [n, size * d]."""

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """The numbers, below 2^63, of each rank. Waits on the host for every rank."""


class Alone:
    """A group of one: each collective returns the part of this rank."""

    rank = 0
    size = 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        return [numbers]


ALONE = Alone()


class _DividedLinear:
    """See Linear: `combine` makes the output of all ranks of that of this rank's part."""

    def __init__(
        self, part: Linear, out_features: int, combine: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._part = part
        self._combine = combine
        self.out_features = out_features

    def __call__(self, x: torch.Tensor, delta: Delta | None = None) -> torch.Tensor:
        return self._combine(self._part(x, delta))

    def full(self, x: torch.Tensor) -> torch.Tensor:
        return self._combine(self._part.full(x))


class SummedLinear(_DividedLinear):
    """vLLM's RowParallelLinear: each rank has some columns of the input; products are summed."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        super().__init__(part, part.out_features, ranks.sum)


class GatheredLinear(_DividedLinear):
    """vLLM's ColumnParallelLinear: each rank computes some columns of the output; all get all."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        super().__init__(part, part.out_features * ranks.size, ranks.gather)
