"""Builds a worker from its settings: reads the model, sizes the cache, warms up."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from services.worker.adapters.machine import available_memory_bytes
from services.worker.attention.interface import AttentionShape
from services.worker.core.batch import BatchLimits
from services.worker.core.engine import Engine, WorkerDescription
from services.worker.core.fingerprint import model_fingerprint
from services.worker.core.kv_cache import (
    KVCacheDemand,
    KVCacheMemory,
    KVCacheSizing,
    estimate_activation_bytes,
    size_kv_cache,
)
from services.worker.core.kv_groups import LayerGroup, group_layers
from services.worker.core.runner import Runner
from services.worker.core.warm_up import warm_up
from services.worker.kernels.interface import Kernels
from services.worker.kernels.torch_kernels import TorchKernels
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.load import load_model
from services.worker.models.model import LoadedModel, LoadOptions
from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 10


def build_engine(
    settings: WorkerSettings, incarnation: str, checkpoint_reached: Callable[[], None]
) -> Engine:
    """Loads and warms up. Run it in the thread that will compute.

    `checkpoint_reached` is called every now and then, and may raise to give up. Raises ModelError
    for a directory that cannot be served, KVCacheTooSmall when there is not enough memory.
    """
    checkpoint = open_checkpoint(settings.model)
    tell, kernels = _Progress(checkpoint_reached), TorchKernels()
    options = LoadOptions(settings.max_model_len, settings.dtype)
    loaded = load_model(checkpoint, options, kernels, tell.of("loading layers"))
    fingerprint = model_fingerprint(
        checkpoint, settings.block_size, _name(loaded.dtype), rope_length=loaded.rope_length
    )
    groups = group_layers([layer.window for layer in loaded.attention])
    shape = AttentionShape(
        loaded.attention,
        settings.block_size,
        num_blocks=0,
        dtype=loaded.dtype,
        groups=tuple(group.layers for group in groups),
    )
    sizing = _size_kv_cache(settings, loaded, shape, groups, kernels)
    logger.info("KV cache: %s", sizing.explanation)
    limits = BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=sizing.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        vocab_size=loaded.vocab_size,
        block_size=settings.block_size,
        num_blocks=sizing.num_blocks,
        windows=tuple(group.window for group in groups),
    )
    attention = kernels.paged_attention(replace(shape, num_blocks=sizing.num_blocks))
    runner = Runner(loaded.model, attention, limits)
    warm_up(runner, limits, tell.of("warming up"))
    return Engine(
        runner,
        WorkerDescription(
            incarnation=incarnation,
            model_name=settings.served_model_name or settings.model.resolve().name,
            fingerprint=fingerprint,
            max_model_len=limits.max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            groups=groups,
            block_size=settings.block_size,
            num_blocks=sizing.num_blocks,
            bytes_per_block=shape.bytes_per_block,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_cache_sizing=sizing.explanation,
            dtype=_name(loaded.dtype),
        ),
    )


def _size_kv_cache(
    settings: WorkerSettings,
    loaded: LoadedModel,
    shape: AttentionShape,
    groups: tuple[LayerGroup, ...],
    kernels: Kernels,
) -> KVCacheSizing:
    activation_bytes = estimate_activation_bytes(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        hidden_size=loaded.hidden_size,
        intermediate_size=loaded.intermediate_size,
        vocab_size=loaded.vocab_size,
        attention_bytes=kernels.attention_bytes(shape, loaded.max_model_len),
        itemsize=loaded.dtype.itemsize,
    )
    return size_kv_cache(
        KVCacheDemand(
            bytes_per_block=shape.bytes_per_block,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=loaded.max_model_len,
            max_model_len_asked=settings.max_model_len is not None,
            groups=groups,
        ),
        KVCacheMemory(
            num_blocks=settings.num_blocks,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            memory_utilization=settings.memory_utilization,
            available_bytes=available_memory_bytes(),
            activation_bytes=activation_bytes,
        ),
    )


class _Progress:
    """Logs progress in tenths."""

    def __init__(self, checkpoint_reached: Callable[[], None]) -> None:
        self._checkpoint_reached = checkpoint_reached

    def of(self, what: str) -> Callable[[int, int], None]:
        """A listener that logs `what` with the share that is done."""

        def listener(done: int, total: int) -> None:
            self._checkpoint_reached()
            if done * _PROGRESS_STEPS // total > (done - 1) * _PROGRESS_STEPS // total:
                logger.info("%s: %d%%", what, 100 * done // total)

        return listener


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
