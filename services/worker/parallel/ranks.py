"""Collectives of the ranks that share a model, and the projections that are divided over them.

The division is Megatron-LM's (Shoeybi et al.): the projections into heads and into the inside of an
MLP are divided by columns, those out of them by rows, so that a layer has two sums over the ranks.
"""

from typing import Protocol

import torch

from services.worker.backends.kernels import Linear


class Ranks(Protocol):
    """The collectives of a group, on one rank. All ranks make the same calls in one order, with
    tensors of the same shape, and get the same bits.
    """

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `part`, which may be overwritten. Where ranks are added one by one
        they are in rank order, so that a row's sum does not depend on the rows beside it.
        """
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[n, d] of each rank side by side, in rank order: [n, size * d]."""
        ...

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """The numbers, below 2^63, of each rank. Waits on the host for every rank."""
        ...


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Itself."""
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Itself."""
        return part

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of this rank."""
        return [numbers]


ALONE = Alone()


class SummedLinear:
    """A projection divided by rows of its input: the ranks' products are summed."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks
        self.in_features = part.in_features
        self.out_features = part.out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear; x is this rank's part."""
        return self._ranks.sum(self._part(x))

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._ranks.sum(self._part.full(x))


class GatheredLinear:
    """A projection divided by columns of its output, which all ranks get whole."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks
        self.in_features = part.in_features
        self.out_features = part.out_features * ranks.size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._ranks.gather(self._part(x))

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._ranks.gather(self._part.full(x))
