"""The common base of the platforms that compute models with weights (CPU and CUDA)."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.backends.kernels import Kernels
from services.worker.backends.ranks import Ranks
from services.worker.models.files.checkpoint import Checkpoint, open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.models.weights import Progress
from services.worker.platforms.interface import RunnerParts


class ComputingPlatform(ABC):
    """Implements the methods of Platform that CPU and CUDA have in common."""

    torch_device: torch.device

    @abstractmethod
    def kernels(self) -> Kernels:
        """Returns the operations with which the model runs."""

    def open(self, directory: Path) -> Checkpoint:
        return open_checkpoint(directory, self.torch_device)

    def load(
        self,
        checkpoint: Checkpoint,
        options: LoadOptions,
        progress: Progress,
        ranks: Ranks,
        wait_for_ranks: Callable[[], None],
    ) -> LoadedModel:
        return load_model(checkpoint, options, self.kernels(), progress, ranks, wait_for_ranks)

    def stored_block_bytes(self, parts: RunnerParts) -> int:
        return parts.bytes_per_block
