"""The interface of platforms. A platform is the code for one kind of device."""

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
    """The shape of the draft model's cache. It has as many blocks as the target model's cache."""
    group: int
    """The target model's KV-cache group whose block tables the draft model uses."""
    fingerprint: bytes
    """Fingerprint of the draft model, see model_fingerprint."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """The parts from which a platform builds a runner."""

    loaded: LoadedModel
    kernels: Kernels
    shape: AttentionShape
    limits: BatchLimits
    lockstep: Lockstep | None = None
    """Runs steps together with the other ranks, if there are any."""
    pooler: PromptPooler | None = None
    """Pools prompts. It is None if the model generates."""
    stage: PipelineStage | None = None
    """This rank's pipeline stage, or None if the model is not divided into stages."""
    make_tier: Callable[[Sequence[torch.Tensor]], Tier] | None = None
    """Makes the tier of offloaded blocks, given the pages of all caches. None without a tier."""
    grammars: Grammars | None = None
    """Compiles grammars. It is None if the rank does not sample."""
    adapters: LoraAdapters | None = None
    """The loaded LoRA adapters. They are None if LoRA is not enabled."""
    drafter: Drafter | None = None
    """Proposes drafts. None without speculation, and with `draft_model`, whose drafter the platform
    builds.
    """
    drafter_bytes: int = 0
    """Limit on the host memory that `drafter` may allocate later, in bytes."""
    draft_model: DraftModelParts | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of all pages of a block, including the draft model's pages."""
        own, draft = self.shape.bytes_per_block, self.draft_model
        return own if draft is None else own + draft.shape.bytes_per_block

    def sized(self, num_blocks: int, max_model_len: int) -> "RunnerParts":
        """The parts with a cache of `num_blocks`, for sequences of up to `max_model_len` tokens."""
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
    """A kind of device that a worker computes on."""

    torch_device: torch.device
    default_block_size: int
    """Tokens per block if the settings do not set it."""
    has_tier: bool
    """Whether this platform's runners support a tier of offloaded blocks."""
    scales_blocks: bool
    """Whether block sizes may differ between groups, see kv_groups."""
    has_draft_models: bool
    """Whether this platform's runners support a draft model."""
    num_speculative_rows: int
    """Rows that a decode step computes in about the time of one row. 0 means unlimited."""

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        """The data type for loading the model, given the setting."""

    def kernels(self) -> Kernels:
        """The operations that the model runs with."""

    def open(self, directory: Path) -> Checkpoint:
        """The tensors of a model directory. Raises ModelError if the model cannot be served."""

    def load(
        self,
        checkpoint: Checkpoint,
        options: LoadOptions,
        progress: Progress,
        ranks: Ranks,
        wait_for_ranks: Callable[[], None],
    ) -> LoadedModel:
        """Loads a decoder, or this rank's part of it, see load_model."""

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Raises UnsuitableDevice for a model that this device cannot compute."""

    def free_memory(self, parts: RunnerParts) -> FreeMemory:
        """The memory that is available to the KV cache. `parts` must not have a cache yet."""

    def stored_block_bytes(self, parts: RunnerParts) -> int:
        """Bytes of all pages of a block, as they are stored in a tier."""

    def runner(self, parts: RunnerParts) -> StepRunner:
        """Builds a runner with its KV cache."""

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        """Steps to run at startup, so that the first request's steps are as fast as later ones."""
