"""The operations on a CUDA device: torch's own, and attention through xFormers."""

from services.worker.attention.interface import AttentionShape
from services.worker.attention.xformers_ops import Operator
from services.worker.attention.xformers_paged import XformersPagedAttention
from services.worker.device import Device
from services.worker.kernels.torch_kernels import TorchKernels


class CudaKernels(TorchKernels):
    """See Kernels. `split_k`: see XformersPagedAttention."""

    def __init__(self, device: Device, max_model_len: int, split_k: Operator | None = None) -> None:
        self._device = device
        self._max_model_len = max_model_len
        self._split_k = split_k

    def padded_rows(self, num_rows: int) -> int:
        """Any number of rows is as good as another."""
        return num_rows

    def paged_attention(self, shape: AttentionShape) -> XformersPagedAttention:
        """See Kernels."""
        width = -(-self._max_model_len // shape.block_size)
        return XformersPagedAttention(shape, self._device, width, self._split_k)
