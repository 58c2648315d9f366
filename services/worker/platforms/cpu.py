"""A worker on the CPU."""

from typing import cast

from services.worker.backends.attention import CPU, AttentionShape, PagedAttention
from services.worker.backends.hybrid_cache import PagesOfKeys, cache_of
from services.worker.backends.kernels import Kernels
from services.worker.core.input_batch import BatchLimits
from services.worker.core.kv_cache import FreeMemory
from services.worker.core.kv_tier import KVTier
from services.worker.core.model_runner import ModelRunner
from services.worker.core.pipeline import StagedModel
from services.worker.models.config import DtypeSetting
from services.worker.models.model import LoadedModel
from services.worker.platforms.interface import Parts
from services.worker.platforms.machine import available_memory_bytes
from services.worker.platforms.prompt_shapes import PromptShape, first_shapes


class CpuPlatform:
    """See Platform. `num_sharers`: workers that share the machine's memory."""

    torch_device = CPU
    default_block_size = 16
    default_memory_utilization = 0.7
    has_tier = True
    num_speculative_rows = 12
    """What a step computes while it reads the weights: by the ratio of 0.4 TFLOP/s and 35 GB/s."""

    def __init__(
        self, kernels: Kernels, memory_utilization: float | None, num_sharers: int = 1
    ) -> None:
        self._kernels = kernels
        self._memory_utilization = memory_utilization or self.default_memory_utilization
        self._num_sharers = num_sharers

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        """As in the setting."""
        return asked

    def kernels(self) -> Kernels:
        """The kernels that were selected."""
        return self._kernels

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Every model can be computed."""

    def free_memory(self, parts: Parts) -> FreeMemory:
        """The machine's available memory, less an upper estimate of what the largest step takes.

        That is for each token residual, normalized and attended states and the fused projections,
        for each row that is sampled logits in float32 and the sampler's copies, and what attention
        takes.
        """
        loaded, limits = parts.loaded, parts.limits
        num_sampled = limits.max_sampled_rows if parts.stage is None or parts.stage.is_last else 0
        width = 6 * loaded.hidden_size + 4 * loaded.intermediate_size
        return FreeMemory(
            of_bytes=available_memory_bytes() // self._num_sharers,
            utilization=self._memory_utilization,
            activation_bytes=limits.max_num_batched_tokens * width * loaded.dtype.itemsize
            + num_sampled * 4 * 4 * loaded.vocab_size
            + parts.kernels.attention_bytes(parts.shape, loaded.max_model_len),
        )

    def runner(self, parts: Parts) -> ModelRunner:
        attention, states = cache_of(parts.kernels, parts.shape)
        model = parts.loaded.model
        return ModelRunner(
            model if parts.stage is None else StagedModel(model, parts.stage),
            attention,
            parts.limits,
            lockstep=parts.lockstep,
            pooler=parts.pooler,
            states=states,
            stage=parts.stage,
            tier=_tier(parts, attention),
            grammars=parts.grammars,
            adapters=parts.adapters,
            drafter=parts.drafter,
            row_sampler=parts.kernels.row_sampler(),
        )

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        """A prompt, a chunk and a decode."""
        return first_shapes(limits)


def _tier(parts: Parts, attention: PagedAttention) -> KVTier | None:
    """The tier of offloaded blocks, if there is memory for one."""
    if parts.tier_memory is None:
        return None
    return KVTier(parts.tier_memory, cast(PagesOfKeys, attention).pages)
