"""The collectives of ranks on one machine, in C++: see cpp/shared_ranks.h."""

import ctypes
import mmap

import torch

from services.worker.backends.native.library import NativeSharedRanks, RankFunctions
from services.worker.backends.ranks import GatheringRanks

_CELL_BYTES = 64
_SLOT_BYTES = 2**20
_ROUNDS = 2
"""Slots of each rank in the shared memory. Consecutive collectives use different slots."""


class NativeRanks(GatheringRanks):
    """SharedRanks in C++. A fused decoder calls the library's collectives itself."""

    def __init__(self, library: ctypes.CDLL, rank: int, size: int, timeout_seconds: float) -> None:
        super().__init__(rank, size)
        self._functions = RankFunctions(library)
        self._timeout_seconds = timeout_seconds
        self.structure = NativeSharedRanks(rank=rank, size=size, missing=-1)
        self.structure.slot_bytes, self.structure.timeout_seconds = _SLOT_BYTES, timeout_seconds
        self._reference = ctypes.byref(self.structure)
        self._memory: mmap.mmap | None = None
        self._cell_bytes = -(-size * _CELL_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        """Size of all cells in bytes, rounded up to whole pages. Each rank has one cell, in which
        it stores the number of the last collective at which it has arrived. The slots follow the
        cells in memory.
        """
        self.num_bytes = self._cell_bytes + _ROUNDS * size * _SLOT_BYTES

    def use(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.structure.cells = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.structure.slots = self.structure.cells + self._cell_bytes

    def end(self) -> None:
        if self._memory is not None:
            self._functions.end(self._reference)

    def check(self) -> None:
        """Raises RuntimeError if a rank did not arrive at a collective in time."""
        missing = self.structure.missing
        if missing >= 0:
            within = f" within {self._timeout_seconds:g} s"
            raise RuntimeError(
                f"rank {missing} of the {self.size} ranks of this stage did not reach a collective "
                f"operation{'' if self.structure.is_ended else within}"
            )

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        own = part.contiguous()
        parts = torch.empty((self.size, *part.shape), dtype=part.dtype)
        self._functions.gather(self._reference, own.data_ptr(), parts.data_ptr(), own.nbytes)
        self.check()
        return parts
