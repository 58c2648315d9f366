"""The CPU as a platform."""

from collections.abc import Sequence
from typing import cast

from services.worker.backends.attention import CPU, AttentionShape, PagedAttention
from services.worker.backends.hybrid_cache import PagesOfKeys, cache_of
from services.worker.backends.kernels import Kernels
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.drafts.draft_model import DraftModel
from services.worker.core.drafts.drafter import Drafter
from services.worker.core.kv.free_memory import FreeMemory
from services.worker.core.kv.kv_cache import Tier
from services.worker.core.model_runner import ModelRunner
from services.worker.core.pipeline import StagedModel
from services.worker.models.config import DtypeSetting
from services.worker.models.model import LoadedModel
from services.worker.platforms.computing import ComputingPlatform
from services.worker.platforms.interface import RunnerParts
from services.worker.platforms.machine import available_memory_bytes
from services.worker.platforms.prompt_shapes import PromptShape, first_shapes


class CpuPlatform(ComputingPlatform):
    """The Platform of the CPU. `num_sharers` workers share the machine's memory."""

    torch_device = CPU
    default_block_size = 16
    default_memory_utilization = 0.7
    has_tier = True
    has_draft_models = True
    scales_blocks = True
    num_speculative_rows = 12
    """The number of rows (tokens) that a step computes in the time in which it reads the weights,
    on a processor with 0.4 TFLOP/s and 35 GB/s.
    """

    def __init__(
        self, kernels: Kernels, memory_utilization: float | None, num_sharers: int = 1
    ) -> None:
        self._kernels = kernels
        self._memory_utilization = memory_utilization or self.default_memory_utilization
        self._num_sharers = num_sharers

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        return asked

    def kernels(self) -> Kernels:
        return self._kernels

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        """Accepts every model."""

    def free_memory(self, parts: RunnerParts) -> FreeMemory:
        """Returns the machine's available memory, and an upper estimate of the largest step's
        activations.

        The estimate is a sum: for each token the residual, normalized and attended states and the
        fused projections, for each sampled row logits in float32 and the sampler's copies, and
        attention's memory. A draft model computes the step's tokens too, and at most one block more
        for each request. Other drafters need at most `drafter_bytes`.
        """
        loaded, limits, draft = parts.loaded, parts.limits, parts.draft_model
        num_sampled = limits.max_sampled_rows if parts.stage is None or parts.stage.is_last else 0
        activation_bytes = (
            limits.max_num_batched_tokens * _bytes_per_token(loaded)
            + num_sampled * 4 * 4 * loaded.vocab_size
            + parts.kernels.attention_bytes(parts.shape, loaded.max_model_len)
            + parts.drafter_bytes
        )
        if draft is not None:
            size = draft.shape.block_size
            num_tokens = limits.max_num_batched_tokens + limits.max_num_seqs * size
            activation_bytes += (
                num_tokens * _bytes_per_token(draft.loaded)
                + limits.max_num_seqs * 4 * draft.loaded.vocab_size
                + parts.kernels.attention_bytes(draft.shape, draft.loaded.max_model_len)
            )
        return FreeMemory(
            of_bytes=available_memory_bytes() // self._num_sharers,
            utilization=self._memory_utilization,
            activation_bytes=activation_bytes,
        )

    def runner(self, parts: RunnerParts) -> ModelRunner:
        attention, states = cache_of(parts.kernels, parts.shape)
        model, limits, draft = parts.loaded.model, parts.limits, parts.draft_model
        drafter, caches = parts.drafter, [attention]
        if draft is not None:
            caches.append(parts.kernels.paged_attention(draft.shape))
            longest = draft.loaded.max_model_len
            source = DraftModel(
                *(draft.loaded.model, caches[-1], limits), group=draft.group, max_model_len=longest
            )
            drafter = Drafter(source, limits.num_speculative_tokens)
        return ModelRunner(
            model if parts.stage is None else StagedModel(model, parts.stage),
            attention,
            limits,
            lockstep=parts.lockstep,
            pooler=parts.pooler,
            states=states,
            stage=parts.stage,
            tier=_tier(parts, caches),
            grammars=parts.grammars,
            adapters=parts.adapters,
            drafter=drafter,
            row_sampler=parts.kernels.row_sampler(),
        )

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        return first_shapes(limits)


def _bytes_per_token(loaded: LoadedModel) -> int:
    width = 6 * loaded.hidden_size + 4 * loaded.intermediate_size
    return width * loaded.dtype.itemsize


def _tier(parts: RunnerParts, caches: Sequence[PagedAttention]) -> Tier | None:
    if parts.make_tier is None:
        return None
    pages = [page for cache in caches for page in cast(PagesOfKeys, cache).pages]
    return parts.make_tier(pages)
