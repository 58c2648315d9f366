"""Builds a worker from its settings: reads the model, sizes the cache, warms up."""

import logging
import time
from collections.abc import Callable

import torch

from services.common.tokenizer_files import tokenizer_fingerprint
from services.worker.backends.attention import CPU, AttentionShape
from services.worker.backends.device import DeviceSetting, UnsuitableDevice
from services.worker.backends.kernels import Kernels
from services.worker.backends.native.compiled import default_cache_directory
from services.worker.backends.out_of_memory import memory_for
from services.worker.core.batch import BatchLimits
from services.worker.core.fingerprint import model_fingerprint
from services.worker.core.kv_cache import (
    KVCacheDemand,
    KVCacheMemory,
    KVCacheSizing,
    size_kv_cache,
)
from services.worker.core.kv_groups import LayerGroup, group_layers
from services.worker.core.lockstep import Lockstep
from services.worker.core.worker import Worker, WorkerDescription
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import DtypeSetting
from services.worker.models.load import check_configuration, load_model
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.parallel.group import Group, select_cuda_device
from services.worker.parallel.ranks import ALONE, Ranks
from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.cpu_kernels import select_kernels
from services.worker.platforms.cuda import CudaPlatform
from services.worker.platforms.interface import Parts, Platform
from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_QUIET_SECONDS = 2.0


def build_worker(
    settings: WorkerSettings,
    incarnation: str,
    checkpoint_reached: Callable[[], None],
    group: Group | None = None,
) -> Worker:
    """Loads and warms up. Run it in the thread that will compute. With a `group`, as one of its
    ranks.

    `checkpoint_reached` is called every now and then, and may raise to give up. Raises ModelError
    for a directory that cannot be served, KVCacheTooSmall or NotEnoughMemory for want of memory,
    GroupBroken when the ranks of the group do not fit together.
    """
    check_configuration(settings.model)
    platform = _select_platform(settings, checkpoint_reached, group)
    ranks = _ranks(group, platform)
    block_size = settings.block_size or platform.default_block_size
    checkpoint = open_checkpoint(settings.model, platform.torch_device)
    tell, kernels = _Progress(checkpoint_reached), platform.kernels()
    options = LoadOptions(settings.max_model_len, platform.dtype(settings.dtype))

    def meet() -> None:
        if group is not None:
            group.tell("loaded", "")

    weights = f"the weights ({checkpoint.num_bytes / 2**20:.0f} MiB in their files)"
    with memory_for(weights, "use a machine with more, a smaller dtype, or more ranks"):
        loaded = load_model(checkpoint, options, kernels, tell.of("loading layers"), ranks, meet)
    groups = group_layers([layer.window for layer in loaded.attention])
    fingerprint = model_fingerprint(
        checkpoint,
        block_size,
        _name(loaded.dtype),
        rope_length=loaded.rope_length,
        groups=groups,
    )
    shape = AttentionShape(
        loaded.attention,
        block_size,
        num_blocks=0,
        dtype=loaded.dtype,
        device=platform.torch_device,
        groups=tuple(group.layers for group in groups),
    )
    platform.check(shape, loaded)
    limits = BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        vocab_size=loaded.vocab_size,
        block_size=block_size,
        num_blocks=0,
        windows=tuple(group.window for group in groups),
    )
    lockstep = None
    if group is not None:
        mode = _is_batch_invariant(settings, platform.torch_device)
        group.require_same(_in_common(settings, loaded, kernels, fingerprint, mode))
        lockstep = Lockstep(ranks, settings.check_ranks_every_steps, group.watch.explain)
    parts = Parts(loaded, kernels, shape, limits, lockstep)
    sizing = _size_kv_cache(settings, platform, parts, groups)
    if group is not None:
        sizing = _least(sizing, group)
    for line in sizing.explanation.split("; "):
        logger.info("KV cache: %s", line)
    parts = parts.sized(sizing.num_blocks, sizing.max_model_len)
    with memory_for("the KV cache", "lower num_blocks, kv_cache_memory_bytes or max_num_seqs"):
        runner = platform.runner(parts)
    with memory_for("a step", "lower max_num_batched_tokens, max_num_seqs or the KV cache"):
        platform.warm_up(runner, parts.limits, tell.of("warming up"))
    return Worker(
        runner,
        WorkerDescription(
            incarnation=incarnation,
            model_name=settings.served_model_name or settings.model.resolve().name,
            fingerprint=fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
            max_model_len=sizing.max_model_len,
            vocab_size=loaded.vocab_size,
            hidden_size=loaded.hidden_size,
            eos_token_ids=loaded.eos_token_ids,
            groups=groups,
            block_size=block_size,
            num_blocks=sizing.num_blocks,
            bytes_per_block=shape.bytes_per_block,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_cache_sizing=sizing.explanation,
            dtype=_name(loaded.dtype),
            rank=ranks.rank,
            world_size=ranks.size,
        ),
    )


def _select_platform(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> Platform:
    """The platform that the settings ask for.

    On its own the worker takes CUDA where the machine has all that it needs, unless it is to
    compute in float32; what keeps it from that it says. Raises UnsuitableDevice where CUDA was
    asked for, KernelsUnavailable.
    """
    may_be_cuda = torch.cuda.is_available() and settings.dtype is not DtypeSetting.FLOAT32
    tries_cuda = settings.device is DeviceSetting.AUTO and may_be_cuda
    if group is not None and (tries_cuda or settings.device is DeviceSetting.CUDA):
        select_cuda_device(group.local_ranks, group.membership.rank)
    if settings.device is DeviceSetting.CUDA:
        return _cuda_platform(settings, group)
    if tries_cuda:
        try:
            return _cuda_platform(settings, group)
        except UnsuitableDevice as error:
            logger.warning("computing on the CPU: %s", error.message)
    kernels = select_kernels(
        settings.kernels,
        default_cache_directory(),
        checkpoint_reached,
        batch_invariant=_is_batch_invariant(settings, CPU),
    )
    num_sharers = 1 if group is None else len(group.local_ranks)
    return CpuPlatform(kernels, settings.gpu_memory_utilization, num_sharers)


def _cuda_platform(settings: WorkerSettings, group: Group | None) -> CudaPlatform:
    if group is not None and settings.batch_invariant:
        raise UnsuitableDevice(
            "batch_invariant is for one GPU: NCCL chooses by the size of a sum how it is added up; "
            "unset it, or set --tensor-parallel-size 1"
        )
    return CudaPlatform(
        settings.gpu_memory_utilization, batch_invariant=settings.batch_invariant is True
    )


def _is_batch_invariant(settings: WorkerSettings, device: torch.device) -> bool:
    """The mode that was asked for; by default it is on for the CPU and off for CUDA."""
    if settings.batch_invariant is None:
        return device.type == CPU.type
    return settings.batch_invariant


def _ranks(group: Group | None, platform: Platform) -> Ranks:
    if group is None:
        return ALONE
    return group.on_cuda() if platform.torch_device.type == "cuda" else group.ranks


def _in_common(
    settings: WorkerSettings,
    loaded: LoadedModel,
    kernels: Kernels,
    fingerprint: bytes,
    batch_invariant: bool,
) -> dict[str, str]:
    """What ranks must have in common to compute the same; of the model, what identifies it."""
    return {
        "the model": fingerprint.hex()[:16],
        "dtype": _name(loaded.dtype),
        "max_model_len": str(loaded.max_model_len),
        "max_num_seqs": str(settings.max_num_seqs),
        "max_num_batched_tokens": str(settings.max_num_batched_tokens),
        "check_ranks_every_steps": str(settings.check_ranks_every_steps),
        "batch_invariant": str(batch_invariant),
        "what computes": type(kernels).__name__,
    }


def _least(sizing: KVCacheSizing, group: Group) -> KVCacheSizing:
    """What every rank has: they share block tables."""
    num_blocks = group.smallest("num_blocks", sizing.num_blocks)
    max_model_len = group.smallest("max_model_len", sizing.max_model_len)
    if (num_blocks, max_model_len) == (sizing.num_blocks, sizing.max_model_len):
        return sizing
    why = f"{sizing.explanation}; lowered to {num_blocks} blocks, the least of all ranks"
    return KVCacheSizing(num_blocks, max_model_len, why)


def _size_kv_cache(
    settings: WorkerSettings, platform: Platform, parts: Parts, groups: tuple[LayerGroup, ...]
) -> KVCacheSizing:
    limits = parts.limits
    return size_kv_cache(
        KVCacheDemand(
            bytes_per_block=parts.shape.bytes_per_block,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            max_model_len_asked=settings.max_model_len is not None,
            groups=groups,
        ),
        KVCacheMemory(
            num_blocks=settings.num_blocks,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            free=platform.free_memory(parts),
        ),
    )


class _Progress:
    """Logs progress in tenths, where it takes longer than a moment."""

    def __init__(self, checkpoint_reached: Callable[[], None]) -> None:
        self._checkpoint_reached = checkpoint_reached

    def of(self, what: str) -> Callable[[int, int], None]:
        """A listener that logs `what` with the share that is done."""
        told = time.monotonic()

        def listener(done: int, total: int) -> None:
            nonlocal told
            self._checkpoint_reached()
            is_tenth = done * _PROGRESS_STEPS // total > (done - 1) * _PROGRESS_STEPS // total
            if is_tenth and time.monotonic() >= told + _QUIET_SECONDS:
                told = time.monotonic()
                logger.info("%s: %d%%", what, 100 * done // total)

        return listener


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
