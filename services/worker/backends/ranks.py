"""The collectives of the ranks that share a model's layers.

The division is Megatron-LM's (Shoeybi et al.): the projections into heads and into the inside of an
MLP are divided by columns, those out of them by rows, so that a layer has two sums over the ranks.
"""

import mmap
from abc import ABC, abstractmethod
from typing import Protocol

import torch


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


class SharedRanks(Ranks, Protocol):
    """Ranks of one machine, whose collectives go through memory that all of them map.

    A collective raises RuntimeError if it takes longer than the timeout, or after `end`.
    """

    @property
    def num_bytes(self) -> int:
        """The size of the memory, which holds zeros at first."""

    def use(self, memory: mmap.mmap) -> None:
        """Takes the memory. To be called before any collective."""

    def end(self) -> None:
        """Ends collectives that wait, and those to come. May be called by any thread."""


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


class GatheringRanks(ABC):
    """Collectives of tensors on the CPU, each made of one that gathers. A sum is gathered and then
    added in rank order, in float32.
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
        """[n, d] of each rank: [size, n, d]."""
