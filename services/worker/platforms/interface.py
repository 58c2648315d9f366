"""What a worker does differently on each kind of device."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.worker.backends.attention import AttentionShape
from services.worker.backends.kernels import Kernels
from services.worker.core.drafter import Drafter
from services.worker.core.input_batch import BatchLimits
from services.worker.core.kv_cache import FreeMemory
from services.worker.core.kv_tier import Bytes
from services.worker.core.lockstep import Lockstep
from services.worker.core.lora_adapters import LoraAdapters
from services.worker.core.model_runner import ModelRunner
from services.worker.core.pipeline import PipelineStage
from services.worker.core.pooler import PromptPooler
from services.worker.models.config import DtypeSetting
from services.worker.models.model import LoadedModel
from services.worker.platforms.prompt_shapes import PromptShape
from services.worker.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class DraftModelParts:
    """A draft model in memory. `shape`: of its cache, which has the blocks of the model's. `group`:
    the model's KV-cache group whose block tables it uses. `fingerprint`: see model_fingerprint.
    """

    loaded: LoadedModel
    shape: AttentionShape
    group: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a runner. `lockstep` is None for a worker on its own, `pooler` for a model that
    generates, `stage` for a whole model, `grammars` where outputs are not constrained.
    `tier_memory` is that of offloaded blocks, None if there are none; `adapters` is None if
    none are served, `drafter` if there is no speculation; with a `draft_model` the platform makes
    the drafter, which needs its cache. `drafter_bytes`: memory of the host that a `drafter` may
    come to take.
    """

    loaded: LoadedModel
    kernels: Kernels
    shape: AttentionShape
    limits: BatchLimits
    lockstep: Lockstep | None = None
    pooler: PromptPooler | None = None
    stage: PipelineStage | None = None
    tier_memory: Bytes | None = None
    grammars: Grammars | None = None
    adapters: LoraAdapters | None = None
    drafter: Drafter | None = None
    drafter_bytes: int = 0
    draft_model: DraftModelParts | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of all pages of a block, those of the draft model included."""
        own, draft = self.shape.bytes_per_block, self.draft_model
        return own if draft is None else own + draft.shape.bytes_per_block

    def sized(self, num_blocks: int, max_model_len: int) -> "Parts":
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
    """A kind of device."""

    @property
    def torch_device(self) -> torch.device:
        """The device of weights and cache."""

    @property
    def default_block_size(self) -> int:
        """Tokens per block, unless the settings have a number."""

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        """The data type to load the model in, given the setting."""

    def kernels(self) -> Kernels:
        """The operations to run the model with."""

    @property
    def has_tier(self) -> bool:
        """Whether its runners can keep offloaded blocks in a tier."""

    @property
    def scales_blocks(self) -> bool:
        """Whether its cache can have blocks of several numbers of tokens (see kv_groups)."""

    @property
    def has_draft_models(self) -> bool:
        """Whether its runners can propose drafts with a second model."""

    @property
    def num_speculative_rows(self) -> int:
        """Rows that a step of decodes computes in about the time of one; 0: more than there are."""

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Raises UnsuitableDevice for a model that this device cannot compute."""

    def free_memory(self, parts: Parts) -> FreeMemory:
        """The memory from which the KV cache gets a share; `parts` have no cache yet."""

    def runner(self, parts: Parts) -> ModelRunner:
        """A runner with its KV cache."""

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        """Steps to run before the first request, so that its steps are as fast as later ones."""
