"""Kernels on CUDA: torch's, and an alternative with batch-invariant products."""

from collections.abc import Mapping, Sequence

import torch

from services.worker.backends.kernels import Linear
from services.worker.backends.lora import LoraLayer, LoraRows, LoraShape, LoraStep, PackedLora
from services.worker.backends.quantized import QuantizedWeight, Weight
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.backends.torch.lora import GroupedLora, GroupedLoraStep

_ALIGNMENT = 16


class CudaKernels(TorchKernels):
    """Kernels on CUDA, except attention, which platforms/cuda.py selects.

    `grouped` has the data types for which torch's grouped products do not synchronize with the
    host.
    """

    def __init__(self, grouped: frozenset[torch.dtype] = frozenset()) -> None:
        super().__init__(batch_invariant=False)
        self._grouped = grouped
        self._last_lora_step: GroupedLoraStep | None = None

    @property
    def description(self) -> str:
        return "xFormers and torch"

    def padded_torch_rows(self, num_rows: int) -> int:
        return num_rows

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Creates a projection. Quantized weights are dequantized, inputs are never quantized."""
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantized()
        return super().linear(weight, bias)

    def groups_experts(self, dtype: torch.dtype, width: int) -> bool:
        """Whether torch has grouped products for this type and rows are aligned to 16 bytes."""
        return dtype in self._grouped and width * dtype.itemsize % _ALIGNMENT == 0

    def pack_lora(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], dtype: torch.dtype
    ) -> PackedLora:
        if dtype not in self._grouped:
            return super().pack_lora(layers, shapes, dtype)
        return GroupedLora(layers, {part: shape.columns for part, shape in shapes.items()})

    def lora_step(self, rows: LoraRows) -> LoraStep:
        if not all(isinstance(adapter, GroupedLora) for adapter in rows.adapters):
            return super().lora_step(rows)
        self._last_lora_step = GroupedLoraStep(rows, self._last_lora_step)
        return self._last_lora_step


class BatchInvariantKernels(CudaKernels):
    """Kernels with which the bits of a row's result do not depend on the other rows in the batch.

    torch's norms, gates and embeddings have this property already. Experts are computed one by one,
    because torch's grouped product chooses its tiles by the number of rows.
    """

    @property
    def description(self) -> str:
        return "xFormers and Triton, batch-invariant"

    def _plain_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        # Imported here, because a worker on the CPU does not need Triton.
        from services.worker.backends.cuda.fixed_tiles import FixedTilesLinear  # noqa: PLC0415

        return FixedTilesLinear(weight, bias)
