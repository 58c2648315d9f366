"""The kernels of the simulated device: its KV cache, its LoRA adapters, and a sampler of logits."""

from collections.abc import Mapping, Sequence

import torch

from services.worker.backends.attention import AttentionShape
from services.worker.backends.lora import LoraLayer, LoraShape
from services.worker.backends.row_sampler import RowSampler
from services.worker.backends.torch.kernels import TorchKernels
from services.worker.options.simulated.cache import SimulatedCache
from services.worker.options.simulated.model import SimulatedLora


class SimulatedKernels(TorchKernels):
    """Kernels for a SimulatedModel. `profile` is the name of the profile."""

    def __init__(self, profile: str, row_sampler: RowSampler | None = None) -> None:
        super().__init__()
        self._profile = profile
        self._row_sampler = row_sampler

    @property
    def description(self) -> str:
        return f"simulated, profile {self._profile}"

    def row_sampler(self) -> RowSampler | None:
        return self._row_sampler

    def paged_attention(self, shape: AttentionShape) -> SimulatedCache:
        return SimulatedCache(shape)

    def pack_lora(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], dtype: torch.dtype
    ) -> SimulatedLora:
        return SimulatedLora.of(layers)
