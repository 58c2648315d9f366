"""Memory in large pages, for weights and KV caches.

The processor translates the address of every page that it reads. With pages of 2 MiB in place of 4
KiB the processor reads a model's weights up to a tenth faster. The operating system allocates a
large page only inside a single mapping, so tensors are placed one after the other in large
mappings.
"""

import errno
import mmap

import torch

_PAGE = 2 * 2**20
_CHUNK = 64 * 2**20
_LINE = 64


class LargePages:
    """Allocates tensors. A tensor's memory is freed when the tensor and all its views are freed."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of this shape. The operating system allocates its memory when it is
        first written. Raises MemoryError.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        taken = -(-size // _LINE) * _LINE
        if taken > len(self._rest):
            self._rest = _map(max(taken, _CHUNK))
        piece, self._rest = self._rest[:size], self._rest[taken:]
        return piece.view(dtype).view(shape)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _map(size: int) -> torch.Tensor:
    """Maps bytes, aligned to a large page, or to an ordinary page if there are no large pages."""
    try:
        mapped = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"the system cannot provide {size} bytes of memory") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -whole.data_ptr() % _PAGE
    return whole[begin : begin + size]
