"""What a worker does differently on each kind of device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.worker.backends.attention import AttentionShape
from services.worker.backends.kernels import Kernels
from services.worker.core.batch import BatchLimits
from services.worker.core.kv_cache import FreeMemory
from services.worker.core.lockstep import Lockstep
from services.worker.core.runner import Runner
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

    def in_lockstep(self, lockstep: Lockstep) -> "Parts":
        """The same for a rank of a group."""
        return replace(self, lockstep=lockstep)

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
