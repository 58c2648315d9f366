"""The operations on a CUDA device: torch's own, and in place of its products some that do not
depend on what else is in the batch.
"""

import torch

from services.worker.backends.kernels import Linear
from services.worker.backends.torch.kernels import TorchKernels

_ALIGNMENT = 16


class CudaKernels(TorchKernels):
    """See Kernels. Attention through xFormers needs more than a shape, and is made elsewhere.

    `grouped`: data types in which torch multiplies grouped matrices without asking the host.
    """

    def __init__(self, grouped: frozenset[torch.dtype] = frozenset()) -> None:
        super().__init__(batch_invariant=False)
        self._grouped = grouped

    def padded_rows(self, num_rows: int) -> int:
        """Any number of rows is as good as another."""
        return num_rows

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:
        """See Kernels. Rows must begin where the kernel can copy from."""
        return dtype in self._grouped and width * dtype.itemsize % _ALIGNMENT == 0


class BatchInvariantKernels(CudaKernels):
    """See Kernels. A row of a result is the same bit for bit whatever else is in the batch.

    Torch's norms, gates and embeddings are so anyway. Experts are multiplied by one by one: torch's
    grouped multiplication chooses its tiles by the number of rows.
    """

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See Kernels."""
        # Only here: importing it imports Triton, which a worker on the CPU does without.
        from services.worker.backends.cuda.fixed_tiles import FixedTilesLinear  # noqa: PLC0415

        return FixedTilesLinear(weight, bias)
