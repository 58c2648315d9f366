"""What a worker does differently on each kind of device, and what it does on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.worker.adapters.machine import available_memory_bytes
from services.worker.attention.interface import CPU, AttentionShape
from services.worker.core.batch import BatchLimits
from services.worker.core.kv_cache import FreeMemory, estimate_activation_bytes
from services.worker.core.lockstep import Lockstep
from services.worker.core.runner import Runner
from services.worker.core.warm_up import warm_up
from services.worker.kernels.interface import Kernels
from services.worker.models.config import DtypeSetting
from services.worker.models.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runner is made of. `lockstep` where there are ranks."""

    loaded: LoadedModel
    kernels: Kernels
    shape: AttentionShape
    limits: BatchLimits
    lockstep: Lockstep | None = None

    def sized(self, num_blocks: int, max_model_len: int) -> "Parts":
        """With a cache of so many blocks, for sequences up to a length."""
        return replace(
            self,
            shape=replace(self.shape, num_blocks=num_blocks),
            limits=replace(self.limits, num_blocks=num_blocks, max_model_len=max_model_len),
        )


class Platform(Protocol):
    """One kind of device."""

    @property
    def torch_device(self) -> torch.device:
        """Where weights and cache are."""
        ...

    @property
    def default_block_size(self) -> int:
        """Tokens per block where nobody says how many."""
        ...

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        """The data type to ask of the model."""
        ...

    def kernels(self) -> Kernels:
        """The operations that the model is made of."""
        ...

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Raises UnsuitableDevice for a model that cannot be computed here."""
        ...

    def free_memory(self, parts: Parts) -> FreeMemory:
        """The memory that the KV cache may take its share of; `parts` have no cache yet."""
        ...

    def runner(self, parts: Parts) -> Runner:
        """A runner with its KV cache."""
        ...

    def warm_up(
        self, runner: Runner, limits: BatchLimits, progress: Callable[[int, int], None]
    ) -> None:
        """Runs what makes the first steps that somebody asks for as fast as the rest."""
        ...


class CpuPlatform:
    """The processors of this machine. `num_sharers`: workers that share its memory."""

    torch_device = CPU
    default_block_size = 16

    def __init__(self, kernels: Kernels, memory_utilization: float, num_sharers: int = 1) -> None:
        self._kernels = kernels
        self._memory_utilization = memory_utilization
        self._num_sharers = num_sharers

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        """As asked for."""
        return asked

    def kernels(self) -> Kernels:
        """Those that were selected."""
        return self._kernels

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Every model can be computed."""

    def free_memory(self, parts: Parts) -> FreeMemory:
        """What the machine has available, less an estimate."""
        loaded, limits = parts.loaded, parts.limits
        return FreeMemory(
            of_bytes=available_memory_bytes() // self._num_sharers,
            utilization=self._memory_utilization,
            activation_bytes=estimate_activation_bytes(
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_num_seqs=limits.max_num_seqs,
                hidden_size=loaded.hidden_size,
                intermediate_size=loaded.intermediate_size,
                vocab_size=loaded.vocab_size,
                attention_bytes=parts.kernels.attention_bytes(parts.shape, loaded.max_model_len),
                itemsize=loaded.dtype.itemsize,
            ),
        )

    def runner(self, parts: Parts) -> Runner:
        """See Platform."""
        attention = parts.kernels.paged_attention(parts.shape)
        return Runner(parts.loaded.model, attention, parts.limits, lockstep=parts.lockstep)

    def warm_up(
        self, runner: Runner, limits: BatchLimits, progress: Callable[[int, int], None]
    ) -> None:
        """A prompt, a chunk and a decode."""
        warm_up(runner, limits, progress)
