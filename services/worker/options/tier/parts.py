"""Allocates the tier of host memory for offloaded KV-cache blocks."""

import logging
from dataclasses import replace
from functools import partial

from services.common.pool.kv_cache_groups import MambaCacheMode
from services.worker.backends.out_of_memory import NotEnoughMemory, memory_for
from services.worker.core.errors import NoTier
from services.worker.options.tier.kv_tier import KVTier, tier_memory
from services.worker.parts.rank_setup import RankSetup
from services.worker.platforms.interface import RunnerParts

logger = logging.getLogger(__name__)


def with_tier(setup: RankSetup, parts: RunnerParts) -> RunnerParts:
    """Adds this rank's part of the tier to `parts`, if the settings enable a tier. All ranks have
    the same number of tier blocks, because each rank stores its own part of every block.

    Raises NoTier if the device or the model does not support offloading, and NotEnoughMemory.
    """
    size = setup.settings.kv_offloading_size
    if size is None:
        return parts
    _check(setup, parts)
    num_ranks, block = setup.membership.size, parts.bytes_per_block
    num_bytes = int(size * 2**30) // num_ranks
    num_blocks = num_bytes // block
    if not num_blocks:
        raise NoTier(
            f"kv_offloading_size: {size:g} GiB are less than one block of {block} bytes on each of "
            f"{num_ranks} ranks"
        )
    available = setup.platform.free_memory(parts).of_bytes
    if num_blocks * block > available:
        raise NotEnoughMemory(
            f"kv_offloading_size: {num_blocks * block / 2**20:.1f} MiB are needed, but the "
            f"available memory is only {available / 2**20:.1f} MiB"
        )
    num_blocks = setup.least_of_ranks("num_tier_blocks", num_blocks)
    with memory_for("offloaded blocks", "lower kv_offloading_size"):
        memory = tier_memory(num_blocks, setup.platform.stored_block_bytes(parts))
    logger.info(
        "host memory for offloaded blocks: %d blocks, %.1f MiB (kv_offloading_size)",
        num_blocks,
        memory.nbytes / 2**20,
    )
    limits = replace(parts.limits, num_tier_blocks=num_blocks)
    return replace(parts, limits=limits, make_tier=partial(KVTier, memory))


def _check(setup: RankSetup, parts: RunnerParts) -> None:
    if not setup.platform.has_tier:
        raise NoTier("kv_offloading_size: only workers on the CPU keep offloaded blocks")
    overwrites = setup.settings.mamba_cache_mode is MambaCacheMode.NONE
    if parts.limits.state_block_sizes and overwrites:
        raise NoTier(
            "kv_offloading_size: states of recurrent layers that each step overwrites cannot be "
            "offloaded: set mamba_cache_mode to align"
        )
