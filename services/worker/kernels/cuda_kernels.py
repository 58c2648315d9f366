"""The operations on a CUDA device: torch's own."""

import torch

from services.worker.kernels.torch_kernels import TorchKernels

_ALIGNMENT = 16


class CudaKernels(TorchKernels):
    """See Kernels. Attention through xFormers needs more than a shape, and is made elsewhere.

    `grouped`: data types in which torch multiplies grouped matrices without asking the host.
    """

    def __init__(self, grouped: frozenset[torch.dtype] = frozenset()) -> None:
        self._grouped = grouped

    def padded_rows(self, num_rows: int) -> int:
        """Any number of rows is as good as another."""
        return num_rows

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:
        """See Kernels. Rows must begin where the kernel can copy from."""
        return dtype in self._grouped and width * dtype.itemsize % _ALIGNMENT == 0
