"""Builds a worker from its settings: reads the model, sizes the cache, warms up."""

import gc
import logging
import time
import uuid
from collections.abc import Callable

import torch

from services.common.tokenizer_files import tokenizer_fingerprint
from services.worker.backends.attention import AttentionShape
from services.worker.backends.kernels import Kernels
from services.worker.backends.out_of_memory import memory_for
from services.worker.core.fingerprint import model_fingerprint
from services.worker.core.input_batch import BatchLimits
from services.worker.core.kv_cache import (
    KVCacheDemand,
    KVCacheMemory,
    KVCacheSizing,
    size_kv_cache,
)
from services.worker.core.kv_groups import LayerGroup, group_layers
from services.worker.core.lockstep import Lockstep
from services.worker.core.model_runner import ModelRunner
from services.worker.core.worker import Worker, WorkerDescription
from services.worker.models.checkpoint import Checkpoint, open_checkpoint
from services.worker.models.load import check_configuration, load_model
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.parallel.group import Group
from services.worker.parallel.ranks import ALONE, Ranks
from services.worker.platform_choice import is_batch_invariant, select_platform
from services.worker.platforms.interface import Parts, Platform
from services.worker.platforms.processors import usable_processors
from services.worker.platforms.threads import choose_threads
from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10
_QUIET_SECONDS = 2.0


def load_worker(
    settings: WorkerSettings, checkpoint_reached: Callable[[], None], group: Group | None
) -> Worker:
    """Builds a worker with as many threads as this process should compute with, and logs the time.

    Raises as `build_worker` does.
    """
    num_sharers = 1 if group is None else len(group.local_ranks)
    threads = choose_threads(usable_processors(), num_sharers, settings.num_threads)
    torch.set_num_threads(threads.num_threads)
    began = time.monotonic()
    worker = build_worker(settings, uuid.uuid4().hex, checkpoint_reached, group)
    # What is loaded stays: a full collection between two steps need not visit it.
    gc.collect()
    gc.freeze()
    took = time.monotonic() - began
    logger.info("loaded and warm after %.1f s, computing with %s", took, threads)
    return worker


def build_worker(
    settings: WorkerSettings,
    incarnation: str,
    checkpoint_reached: Callable[[], None],
    group: Group | None = None,
) -> Worker:
    """Loads the model and warms up, in the thread that will compute; with a `group`, as one of its
    ranks.

    `checkpoint_reached` is called many times, and may raise to end the start. Raises ModelError for
    a directory that cannot be served, KVCacheTooSmall or NotEnoughMemory if memory is too small,
    UnsuitableDevice, KernelsUnavailable, and GroupBroken if the ranks of the group do not match.
    """
    check_configuration(settings.model)
    platform = select_platform(settings, checkpoint_reached, group)
    ranks, progress = _ranks(group, platform), _Progress(checkpoint_reached)
    checkpoint = open_checkpoint(settings.model, platform.torch_device)
    kernels = platform.kernels()
    loaded = _load(settings, platform, checkpoint, kernels, progress, ranks, group)
    groups = group_layers([layer.window for layer in loaded.attention])
    parts = _parts(settings, platform, loaded, kernels, groups)
    platform.check(parts.shape, loaded)
    fingerprint = model_fingerprint(
        checkpoint,
        parts.shape.block_size,
        _name(loaded.dtype),
        rope_length=loaded.rope_length,
        groups=groups,
    )
    if group is not None:
        group.require_same(_in_common(settings, parts, fingerprint))
        parts = parts.in_lockstep(
            Lockstep(ranks, settings.check_ranks_every_steps, group.watch.explain)
        )
    sizing = _size_kv_cache(settings, platform, parts, groups)
    if group is not None:
        sizing = _least(sizing, group)
    for line in sizing.explanation.split("; "):
        logger.info("KV cache: %s", line)
    parts = parts.sized(sizing.num_blocks, sizing.max_model_len)
    return Worker(
        _warm_runner(platform, parts, progress),
        _description(settings, incarnation, fingerprint, parts, groups, sizing, ranks),
    )


def _ranks(group: Group | None, platform: Platform) -> Ranks:
    if group is None:
        return ALONE
    return group.on_cuda() if platform.torch_device.type == "cuda" else group.ranks


def _load(
    settings: WorkerSettings,
    platform: Platform,
    checkpoint: Checkpoint,
    kernels: Kernels,
    progress: "_Progress",
    ranks: Ranks,
    group: Group | None,
) -> LoadedModel:
    """The model, or this rank's part of it, in memory."""

    def wait_for_ranks() -> None:
        if group is not None:
            group.gather("loaded", "")

    options = LoadOptions(settings.max_model_len, platform.dtype(settings.dtype))
    weights = f"the weights ({checkpoint.num_bytes / 2**20:.0f} MiB in their files)"
    with memory_for(weights, "use a machine with more, a smaller dtype, or more ranks"):
        layer_read = progress.of("loading layers")
        return load_model(checkpoint, options, kernels, layer_read, ranks, wait_for_ranks)


def _parts(
    settings: WorkerSettings,
    platform: Platform,
    loaded: LoadedModel,
    kernels: Kernels,
    groups: tuple[LayerGroup, ...],
) -> Parts:
    """What a runner is made of, for a cache without blocks."""
    block_size = settings.block_size or platform.default_block_size
    shape = AttentionShape(
        loaded.attention,
        block_size,
        num_blocks=0,
        dtype=loaded.dtype,
        device=platform.torch_device,
        groups=tuple(group.layers for group in groups),
    )
    limits = BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=loaded.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        vocab_size=loaded.vocab_size,
        block_size=block_size,
        num_blocks=0,
        windows=tuple(group.window for group in groups),
    )
    return Parts(loaded, kernels, shape, limits)


def _in_common(settings: WorkerSettings, parts: Parts, fingerprint: bytes) -> dict[str, str]:
    """Values, by name, that must be the same on all ranks."""
    return {
        "the model": fingerprint.hex()[:16],
        "dtype": _name(parts.loaded.dtype),
        "max_model_len": str(parts.loaded.max_model_len),
        "max_num_seqs": str(settings.max_num_seqs),
        "max_num_batched_tokens": str(settings.max_num_batched_tokens),
        "check_ranks_every_steps": str(settings.check_ranks_every_steps),
        "batch_invariant": str(is_batch_invariant(settings, parts.shape.device)),
        "what computes": type(parts.kernels).__name__,
    }


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


def _least(sizing: KVCacheSizing, group: Group) -> KVCacheSizing:
    """The smallest sizing of all ranks, since they share block tables."""
    num_blocks = group.smallest("num_blocks", sizing.num_blocks)
    max_model_len = group.smallest("max_model_len", sizing.max_model_len)
    if (num_blocks, max_model_len) == (sizing.num_blocks, sizing.max_model_len):
        return sizing
    why = f"{sizing.explanation}; lowered to {num_blocks} blocks, the least of all ranks"
    return KVCacheSizing(num_blocks, max_model_len, why)


def _warm_runner(platform: Platform, parts: Parts, progress: "_Progress") -> ModelRunner:
    with memory_for("the KV cache", "lower num_blocks, kv_cache_memory_bytes or max_num_seqs"):
        runner = platform.runner(parts)
    with memory_for("a step", "lower max_num_batched_tokens, max_num_seqs or the KV cache"):
        platform.warm_up(runner, parts.limits, progress.of("warming up"))
    return runner


def _description(
    settings: WorkerSettings,
    incarnation: str,
    fingerprint: bytes,
    parts: Parts,
    groups: tuple[LayerGroup, ...],
    sizing: KVCacheSizing,
    ranks: Ranks,
) -> WorkerDescription:
    loaded, shape = parts.loaded, parts.shape
    return WorkerDescription(
        incarnation=incarnation,
        model_name=settings.served_model_name or settings.model.resolve().name,
        fingerprint=fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(settings.model),
        max_model_len=sizing.max_model_len,
        vocab_size=loaded.vocab_size,
        hidden_size=loaded.hidden_size,
        eos_token_ids=loaded.eos_token_ids,
        groups=groups,
        block_size=shape.block_size,
        num_blocks=sizing.num_blocks,
        bytes_per_block=shape.bytes_per_block,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        kv_cache_sizing=sizing.explanation,
        dtype=_name(loaded.dtype),
        rank=ranks.rank,
        world_size=ranks.size,
    )


class _Progress:
    """Logs progress in tenths, if it takes longer than _QUIET_SECONDS."""

    def __init__(self, checkpoint_reached: Callable[[], None]) -> None:
        self._checkpoint_reached = checkpoint_reached

    def of(self, what: str) -> Callable[[int, int], None]:
        """A function that takes the number of parts done and of all, and logs `what` with the
        share that is done.
        """
        logged = time.monotonic()

        def log_progress(done: int, total: int) -> None:
            nonlocal logged
            self._checkpoint_reached()
            is_tenth = done * _PROGRESS_STEPS // total > (done - 1) * _PROGRESS_STEPS // total
            if is_tenth and time.monotonic() >= logged + _QUIET_SECONDS:
                logged = time.monotonic()
                logger.info("%s: %d%%", what, 100 * done // total)

        return log_progress


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
