"""The collectives (sums and gathers) of the ranks that divide a model's layers.

As in Megatron-LM (Shoeybi et al.), the projections to heads and to the inner dimension of an MLP
are divided by columns. The projections back to the hidden dimension are divided by rows. Therefore
a layer needs two sums over the ranks.
"""

import mmap
from abc import ABC, abstractmethod
from typing import Protocol

import torch


class Ranks(Protocol):
    """The collectives of a group of ranks, as one rank sees them. All ranks make the same calls in
    the same order, with tensors of the same shape, and get the same bits.
    """

    rank: int
    """The number of this rank, from 0."""
    size: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' `part`, which may be overwritten. If parts are added one by
        one, they are added in rank order, so that a row's sum does not depend on other rows.
        """

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenates the [n, d] of all ranks in rank order: [n, size * d]."""

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Returns the numbers of all ranks, each below 2^63. The host waits for every rank."""


class SharedRanks(Ranks, Protocol):
    """Ranks of one machine, whose collectives use memory that all of them have mapped.

    A collective raises RuntimeError if it exceeds the timeout, or after `end` was called.
    """

    num_bytes: int
    """The size of the memory, which must initially be zeros."""

    def use(self, memory: mmap.mmap) -> None:
        """Sets the shared memory. Must be called before any collective."""

    def end(self) -> None:
        """Aborts waiting collectives, and all later ones. Callable from any thread."""


class Alone:
    """A group of one rank. Each collective returns this rank's part."""

    rank = 0
    size = 1

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        return [numbers]


ALONE = Alone()


class GatheringRanks(ABC):
    """Collectives of CPU tensors that are based on one gathering operation. A sum adds the gathered
    parts in rank order, in float32.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        parts = self._gathered(part)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return self._gathered(part).transpose(0, 1).flatten(1)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        gathered: list[list[int]] = self._gathered(torch.tensor([numbers])).flatten(1).tolist()
        return gathered

    @abstractmethod
    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The parts [n, d] of all ranks: [size, n, d]."""
