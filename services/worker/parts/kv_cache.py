"""Determines the size of a rank's KV cache, and creates the storage of LoRA adapters."""

import logging
from dataclasses import replace
from pathlib import Path

from services.common.errors import InvalidArgument
from services.worker.backends.lora import PackedLora
from services.worker.backends.out_of_memory import memory_for
from services.worker.core.batch.lora_adapters import LoraAdapters
from services.worker.core.kv import kv_cache
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.models.errors import ModelError, UnsupportedModel
from services.worker.models.model import LoadedModel
from services.worker.parts.rank_setup import RankSetup
from services.worker.platforms.interface import RunnerParts


def make_adapters(setup: RankSetup, loaded: LoadedModel) -> LoraAdapters | None:
    """Creates the storage of LoRA adapters, or returns None if LoRA is not enabled. Raises
    UnsupportedModel if the model does not support LoRA.
    """
    settings, device = setup.settings, setup.platform.torch_device
    num_slots, reader = settings.num_lora_slots, loaded.lora
    if not num_slots:
        return None
    if reader is None:
        raise UnsupportedModel(
            settings.model / "config.json",
            f"enable_lora: adapters are not supported for architecture {loaded.architecture}",
        )

    def read(directory: Path) -> PackedLora:
        try:
            return reader.read(directory, settings.max_lora_rank, device)
        except ModelError as error:
            raise InvalidArgument(error.message, field="path") from error

    return LoraAdapters(read, num_slots)


def adapter_bytes(setup: RankSetup, loaded: LoadedModel) -> int:
    """The memory that the maximum number of loaded adapters needs, in bytes. On CUDA, copies of a
    step's adapters are stacked.
    """
    settings, reader = setup.settings, loaded.lora
    if reader is None or not settings.num_lora_slots:
        return 0
    is_cuda = setup.platform.torch_device.type == "cuda"
    count = settings.num_lora_slots + (settings.max_loras if is_cuda else 0)
    return count * reader.num_bytes(settings.max_lora_rank)


logger = logging.getLogger(__name__)


def size_rank_kv_cache(
    setup: RankSetup, parts: RunnerParts, groups: tuple[LayerGroup, ...]
) -> kv_cache.KVCacheSizing:
    """Determines the size of this rank's KV cache. All ranks use the smallest number of blocks that
    a rank has room for, because they share block tables. Raises KVCacheTooSmall and
    NotEnoughMemory.
    """
    own = kv_cache.size_kv_cache(_demand(setup, parts, groups), _memory(setup, parts))
    num_blocks = setup.least_of_ranks("num_blocks", own.num_blocks)
    max_model_len = setup.least_of_ranks("max_model_len", own.max_model_len)
    if (num_blocks, max_model_len) == (own.num_blocks, own.max_model_len):
        return own
    why = f"{own.explanation}; lowered to {num_blocks} blocks, the minimum of all ranks"
    return kv_cache.KVCacheSizing(num_blocks, max_model_len, why)


def _demand(
    setup: RankSetup, parts: RunnerParts, groups: tuple[LayerGroup, ...]
) -> kv_cache.KVCacheDemand:
    limits = parts.limits
    return kv_cache.KVCacheDemand(
        bytes_per_block=parts.bytes_per_block,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_model_len_asked=setup.settings.max_model_len is not None,
        groups=groups,
        num_steps_in_flight=max(2, setup.membership.pipeline_parallel_size),
    )


def _memory(setup: RankSetup, parts: RunnerParts) -> kv_cache.KVCacheMemory:
    """The memory for the KV cache, which leaves room for LoRA adapters that are loaded later."""
    settings = setup.settings
    with memory_for("a step", "lower max_num_batched_tokens or max_num_seqs"):
        free = setup.platform.free_memory(parts)
    if parts.adapters is not None:
        adapters = adapter_bytes(setup, parts.loaded)
        logger.info("LoRA adapters: %.1f MiB of memory are reserved for them", adapters / 2**20)
        free = replace(free, activation_bytes=free.activation_bytes + adapters)
    return kv_cache.KVCacheMemory(settings.num_blocks, settings.kv_cache_memory_bytes, free)
