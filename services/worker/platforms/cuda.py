"""CUDA as a platform: its kernels, its attention implementation, and its memory."""

import gc
from typing import Any

import torch

from services.worker.backends.attention import AttentionShape
from services.worker.backends.cuda.device import CudaDevice
from services.worker.backends.cuda.kernels import BatchInvariantKernels, CudaKernels
from services.worker.backends.device import Device
from services.worker.backends.kernels import Kernels
from services.worker.backends.torch.paged_attention import TorchPagedAttention
from services.worker.core.batch.device_tokens import DeviceTokens
from services.worker.core.batch.input_batch import BatchLimits
from services.worker.core.decode_buckets import DecodeBuckets
from services.worker.core.kv.free_memory import FreeMemory
from services.worker.core.model_runner import ModelRunner
from services.worker.models.config import DtypeSetting
from services.worker.models.model import LoadedModel
from services.worker.platforms import cuda_setup
from services.worker.platforms.computing import ComputingPlatform
from services.worker.platforms.cuda_setup import suits_xformers
from services.worker.platforms.interface import RunnerParts
from services.worker.platforms.prompt_shapes import (
    PromptShape,
    every_shape,
    profiled_shapes,
    run_prompts,
)

_HOPPER = 9
_PROFILE_BLOCKS = 2
"""KV-cache blocks for profiling: the null block, and one block that all tokens of a step share."""


class CudaPlatform(ComputingPlatform):
    """The Platform of CUDA. The constructor raises UnsuitableDevice if the machine lacks a
    requirement.

    With `batch_invariant`, a request's results do not depend on the other requests in its steps
    (see docs/cuda.md). `num_sharers` is the number of replicas with a worker on this GPU.
    """

    default_block_size = 64
    default_memory_utilization = 0.9
    has_tier = False
    has_draft_models = False
    scales_blocks = False
    num_speculative_rows = 0

    def __init__(
        self,
        memory_utilization: float | None = None,
        *,
        batch_invariant: bool = False,
        num_sharers: int = 1,
    ) -> None:
        cuda_setup.check_setup(cuda_setup.find_setup())
        cuda_setup.load_xformers()
        self.device = CudaDevice()
        self.torch_device = self.device.torch_device
        self._memory_utilization = memory_utilization or self.default_memory_utilization
        self._batch_invariant = batch_invariant
        self._num_sharers = num_sharers

    def dtype(self, asked: DtypeSetting) -> DtypeSetting:
        """Returns the setting, or bfloat16 for AUTO, which all supported GPUs have."""
        return DtypeSetting.BFLOAT16 if asked is DtypeSetting.AUTO else asked

    def kernels(self) -> Kernels:
        """Returns the kernels for this GPU. Only on a Hopper, they multiply grouped matrices whose
        group sizes the host does not know, because torch supports this only there.
        """
        if self._batch_invariant:
            return BatchInvariantKernels()
        major, _ = torch.cuda.get_device_capability()
        return CudaKernels(frozenset({torch.bfloat16}) if major == _HOPPER else frozenset())

    def check(self, shape: AttentionShape, loaded: LoadedModel) -> None:
        cuda_setup.check_states(shape.states)
        cuda_setup.check_model(shape.layers, shape.block_size, shape.dtype)
        if self._batch_invariant:
            cuda_setup.check_batch_invariant(shape.layers, is_native=loaded.is_native)

    def runner(self, parts: RunnerParts) -> ModelRunner:
        """Creates a runner with its own CudaDevice. Its CUDA graphs are freed with the runner."""
        return runner_on(CudaDevice(), parts, batch_invariant=self._batch_invariant)

    def free_memory(self, parts: RunnerParts) -> FreeMemory:
        """Measures the GPU's memory, the memory in use, and the most memory that torch reserves for
        a step. If several workers share the GPU, only this worker's fraction of the memory is
        counted, and only the memory that torch uses in this process.

        The measurement runs the largest steps, with a single block that all tokens share. It
        measures what torch reserves, which is more than its tensors need: the memory of CUDA graphs
        stays reserved while none of them runs.
        """
        _release()
        held = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        small = parts.sized(_PROFILE_BLOCKS, parts.limits.max_model_len)
        runner = self.runner(small)
        for shape in profiled_shapes(small.limits):
            run_prompts(runner, small.limits, shape)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() - held
        if not suits_xformers(parts.shape.layers):  # grows with the sequence length
            peak += parts.kernels.attention_bytes(parts.shape, parts.limits.max_model_len)
        del runner
        _release()
        free, total = torch.cuda.mem_get_info()
        return FreeMemory(
            of_bytes=total // self._num_sharers,
            utilization=self._memory_utilization,
            activation_bytes=peak,
            used_bytes=total - free if self._num_sharers == 1 else torch.cuda.memory_reserved(),
            of_what="of the GPU",
        )

    def warm_up_shapes(self, limits: BatchLimits) -> list[PromptShape]:
        return every_shape(limits)


def runner_on(
    device: Device,
    parts: RunnerParts,
    split_k: type[Any] | None = None,
    *,
    batch_invariant: bool = False,
) -> ModelRunner:
    """Creates a runner. If the model pools, the runner pools prompts. Otherwise it samples on the
    device, and replays recorded decode steps if the model allows it. With speculation it samples on
    the host, because the host must know the tokens to verify drafts.

    xFormers computes attention if its kernel supports every layer. Otherwise torch computes it, and
    decode steps are not recorded, because torch's operations depend on values that change from step
    to step. `split_k` is described in XformersPagedAttention. With `batch_invariant`, which
    requires xFormers' attention, a request's tokens do not depend on other requests in its steps.
    """
    shape, limits, model = parts.shape, parts.limits, parts.loaded.model
    pooler, lockstep, device_tokens = parts.pooler, parts.lockstep, None
    others: Any = {"grammars": parts.grammars, "adapters": parts.adapters, "drafter": parts.drafter}
    if pooler is None and parts.drafter is None:
        device_tokens = DeviceTokens(device, limits.max_num_seqs, by_row=batch_invariant)
    if not suits_xformers(shape.layers):
        plain = TorchPagedAttention(shape, device, batch_invariant=False)
        return ModelRunner(
            *(model, plain, limits, device, device_tokens, None, lockstep, pooler), **others
        )

    # Imported only here, because a worker on the CPU does not need xFormers.
    from services.worker.backends.cuda.paged_attention import XformersPagedAttention  # noqa: PLC0415

    attention = XformersPagedAttention(
        shape, device, limits.max_blocks_per_seq, split_k, batch_invariant=batch_invariant
    )
    records = parts.loaded.is_static and pooler is None
    buckets = DecodeBuckets(model, attention, device) if records else None
    return ModelRunner(
        *(model, attention, limits, device, device_tokens, buckets, lockstep, pooler), **others
    )


def _release() -> None:
    """Returns unused memory from torch to the device, so that it counts as free."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
