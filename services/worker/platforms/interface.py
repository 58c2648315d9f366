"""The port of platforms: what differs between kinds of devices."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.worker.backends.attention import AttentionShape
from services.worker.backends.kernels import Kernels
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.kv.kv_cache import FreeMemory
from services.worker.core.kv.kv_tier import Bytes
from services.worker.core.lockstep import Lockstep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.pipeline import PipelineStage
from services.worker.core.pooler import PromptPooler
from services.worker.models.config import DtypeSetting
from services.worker.models.model import LoadedModel
from services.worker.platforms.prompt_shapes import PromptShape
from services.worker.sampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class DraftModelParts:
    """A draft model in memory."""

    loaded: LoadedModel
    shape: AttentionShape
    """The shape of its cache, which has as many blocks as that of the model."""
    group: int
    """The model's KV-cache group whose block tables it uses."""
    fingerprint: bytes
    """See model_fingerprint."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a runner, from which a platform makes it."""

    loaded: LoadedModel
    kernels: Kernels
    shape: AttentionShape
    limits: BatchLimits
    lockstep: Lockstep | None = None
    """None for a worker on its own."""
    pooler: PromptPooler | None = None
    """None for a model that generates."""
    stage: PipelineStage | None = None
    """None for a whole model."""
    tier_memory: Bytes | None = None
    """Memory of offloaded blocks; None if there are none."""
    grammars: Grammars | None = None
    """None where outputs are not constrained."""
    adapters: LoraAdapters | None = None
    """None if none are served."""
    drafter: Drafter | None = None
    """None without speculation, and with a `draft_model`, whose drafter the platform makes."""
    drafter_bytes: int = 0
    """Memory of the host that `drafter` may come to take."""
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
