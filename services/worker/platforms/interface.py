"""The interface of platforms. A platform contains the code for one kind of device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from services.worker.backends.attention import AttentionShape
from services.worker.backends.kernels import Kernels
from services.worker.backends.ranks import Ranks
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.kv.free_memory import FreeMemory
from services.worker.core.kv.kv_cache import Tier
from services.worker.core.lockstep import Lockstep
from services.worker.core.pipeline import PipelineStage
from services.worker.core.pooler import PromptPooler
from services.worker.core.worker import StepRunner
from services.worker.models.config import DtypeSetting
from services.worker.models.files.checkpoint import Checkpoint
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.models.weights import Progress
from services.worker.platforms.prompt_shapes import PromptShape
from services.worker.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class DraftModelParts:
    loaded: LoadedModel
    shape: AttentionShape
    """The shape of the draft model's KV cache, which has as many blocks as the target model's."""
    group: int
    """The target model's KV-cache group whose block tables the draft model uses."""
    fingerprint: bytes
    """The fingerprint of the draft model (see `model_fingerprint`)."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The parts (model, limits, adapters, ...) from which a platform builds a runner of steps."""

    loaded: LoadedModel
    kernels: Kernels
    shape: AttentionShape
    limits: BatchLimits
    lockstep: Lockstep | None = None
    """Runs each step together with the other ranks. None if there are no other ranks."""
    pooler: PromptPooler | None = None
    """Pools prompts. None if the model generates text."""
    stage: PipelineStage | None = None
    """This rank's pipeline stage. None if the model is not divided into stages."""
    make_tier: Callable[[Sequence[torch.Tensor]], Tier] | None = None
    """Creates the tier of host memory for offloaded KV blocks, given the pages of all KV caches.
    None if the worker has no tier.
    """
    grammars: Grammars | None = None
    """Compiles the grammars that constrain outputs. None if the rank samples no tokens."""
    adapters: LoraAdapters | None = None
    """The loaded LoRA adapters. None if LoRA is not enabled."""
    drafter: Drafter | None = None
    """Proposes drafts. None without speculation, and also None if there is a `draft_model`, for
    which the platform builds the drafter itself.
    """
    drafter_bytes: int = 0
    """Limit on the host memory that `drafter` may allocate later, in bytes."""
    draft_model: DraftModelParts | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of all pages of a KV-cache block, including the draft model's pages."""
        own, draft = self.shape.bytes_per_block, self.draft_model
        return own if draft is None else own + draft.shape.bytes_per_block

    def sized(self, num_blocks: int, max_model_len: int) -> "RunnerParts":
        """Returns these parts with `num_blocks` blocks, for sequences of up to `max_model_len`."""
        draft = self.draft_model
        if draft is not None:
            draft = replace(draft, shape=replace(draft.shape, num_blocks=num_blocks))
        return replace(
            self,
            draft_model=draft,
            shape=replace(self.shape, num_blocks=num_blocks),
            limits=replace(self.limits, num_blocks=num_blocks, max_model_len=max_model_len),
        )


class Platform(Protocol):
    """A kind of device on which a worker computes."""

    torch_device: torch.device
    default_block_size: int
    """The number of tokens per block if the settings do not have one."""
    has_tier: bool
    """Whether this platform's runners support a tier of host memory for offloaded blocks."""
    scales_blocks: bool
    """Whether KV-cache groups may have blocks of different numbers of tokens (see `kv_groups`)."""
    has_draft_models: bool
    """Whether this platform's runners support a draft model."""
    num_speculative_rows: int
    """Rows (tokens) that a decode step computes in about the time of one. 0 means unlimited."""

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        """Returns the data type in which the model is loaded, given the setting."""

    def kernels(self) -> Kernels:
        """Returns the operations with which the model runs."""

    def open(self, directory: Path) -> Checkpoint:
        """Opens a model directory's tensors. Raises ModelError if the model cannot be served."""

    def load(
        self,
        checkpoint: Checkpoint,
        options: LoadOptions,
        progress: Progress,
        ranks: Ranks,
        wait_for_ranks: Callable[[], None],
    ) -> LoadedModel:
        """Loads a decoder, or this rank's part of it (see `load_model`)."""

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Raises UnsuitableDevice for a model that this device cannot compute."""

    def free_memory(self, parts: RunnerParts) -> FreeMemory:
        """Returns the memory available for the KV cache. `parts` has no KV-cache blocks yet."""

    def stored_block_bytes(self, parts: RunnerParts) -> int:
        """The bytes that the tier needs to store a KV-cache block with all its pages."""

    def runner(self, parts: RunnerParts) -> StepRunner:
        """Builds a runner with its KV cache."""

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        """Returns steps to run at startup, without which the first requests' steps are slow."""
