"""Builds a worker from its settings: reads the model, sizes the cache, warms up."""

import logging
from collections.abc import Callable

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
from services.worker.core.runner import Runner
from services.worker.core.warm_up import warm_up
from services.worker.kernels.interface import Kernels
from services.worker.kernels.torch_kernels import TorchKernels
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import (
    ModelConfig,
    read_model_config,
    resolve_dtype,
    resolve_max_model_len,
)
from services.worker.models.decoder import Decoder
from services.worker.models.loader import load_weights
from services.worker.models.rope import RopeType
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
    config = read_model_config(settings.model)
    config_path = settings.model / "config.json"
    longest = resolve_max_model_len(config, settings.max_model_len, config_path)
    dtype = resolve_dtype(settings.dtype, config)
    checkpoint = open_checkpoint(settings.model)
    tell = _Progress(checkpoint_reached)
    logger.info("loading %s from %s in %s", config.architecture.value, settings.model, _name(dtype))
    kernels = TorchKernels()
    weights = load_weights(config, checkpoint, dtype, kernels, tell.of("loading layers"))
    fingerprint = model_fingerprint(
        checkpoint,
        settings.block_size,
        _name(dtype),
        rope_length=longest if config.rope.rope_type is RopeType.DYNAMIC else 0,
    )
    sizing = _size_kv_cache(settings, config, dtype, kernels, longest)
    logger.info("KV cache: %s", sizing.explanation)
    limits = BatchLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=sizing.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        vocab_size=config.vocab_size,
        block_size=settings.block_size,
        num_blocks=sizing.num_blocks,
    )
    shape = AttentionShape(config.attention_layers, settings.block_size, sizing.num_blocks, dtype)
    decoder = Decoder(config, weights, kernels, longest)
    runner = Runner(decoder, kernels.paged_attention(shape), limits)
    warm_up(runner, limits, tell.of("warming up"))
    return Engine(
        runner,
        WorkerDescription(
            incarnation=incarnation,
            model_name=settings.served_model_name or settings.model.resolve().name,
            fingerprint=fingerprint,
            max_model_len=limits.max_model_len,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            num_layers=config.num_layers,
            block_size=settings.block_size,
            num_blocks=sizing.num_blocks,
            bytes_per_block=settings.block_size * config.kv_bytes_per_token(dtype),
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_cache_sizing=sizing.explanation,
            dtype=_name(dtype),
        ),
    )


def _size_kv_cache(
    settings: WorkerSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    kernels: Kernels,
    max_model_len: int,
) -> KVCacheSizing:
    bytes_per_token = config.kv_bytes_per_token(dtype)
    shape = AttentionShape(config.attention_layers, settings.block_size, 0, dtype)
    activation_bytes = estimate_activation_bytes(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        attention_bytes=kernels.attention_bytes(shape, max_model_len),
        itemsize=dtype.itemsize,
    )
    return size_kv_cache(
        KVCacheDemand(
            bytes_per_block=settings.block_size * bytes_per_token,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=max_model_len,
            max_model_len_asked=settings.max_model_len is not None,
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
