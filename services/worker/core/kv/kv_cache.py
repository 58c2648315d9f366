"""Computes the number of KV-cache blocks, and a sentence that explains it.

The memory for the KV cache is a setting. By default it is a fraction of the memory that is
available after the weights were loaded, minus the memory for a step's activations, and the KV cache
has no more blocks than a full batch can use. A configured size is obeyed, because blocks that no
running request uses still cache prefixes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.backends.out_of_memory import NotEnoughMemory
from services.worker.core.errors import KVCacheTooSmall
from services.worker.core.kv.free_memory import FreeMemory
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.core.step import EndedTierLoad, TierBlocks, TierLoad


class Tier(Protocol):
    """Copies blocks between the KV cache and a tier of host memory. Not thread-safe."""

    def store(self, blocks: TierBlocks) -> None: ...

    def begin_loads(self, loads: Sequence[TierLoad]) -> None:
        """Queues copies from the tier to the cache. Loads run one after the other."""

    def take_ended(self, *, is_idle: bool) -> tuple[EndedTierLoad, ...]:
        """Returns the loads that have ended since the last call. `is_idle` means that the step
        computes nothing. The call may then wait a moment for a running load.
        """

    def reset(self) -> None:
        """Waits until no load is running, and drops the results of ended loads."""


_NULL_BLOCKS = 1
_SHORTEST_SEQUENCE = 2
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class KVCacheDemand:
    """The sequences for which the KV cache needs blocks. They limit its number of blocks."""

    bytes_per_block: int
    """Bytes of a block in all its pages."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_model_len_asked: bool
    """Whether the operator set `max_model_len`."""
    groups: tuple[LayerGroup, ...]
    num_steps_in_flight: int = 2
    """The number of steps that are planned or running at once. An asynchronous scheduler plans a
    step while another one runs. With more than two pipeline stages, there are as many steps as
    stages.
    """

    @property
    def most_blocks(self) -> int:
        """The number of blocks for a full batch of the longest sequences, with the null block."""
        return self.max_num_seqs * self.blocks_of(self.max_model_len) + _NULL_BLOCKS

    def blocks_of(self, num_tokens: int) -> int:
        """The maximum number of blocks, over all groups, for `num_tokens` tokens of a sequence."""
        num_steps = self.num_steps_in_flight
        return sum(
            group.kv_cache_group(self.block_size, self.max_model_len).max_held_blocks(
                num_tokens, num_steps * self.max_num_batched_tokens, num_steps
            )
            for group in self.groups
        )

    def longest_within(self, num_blocks: int) -> int:
        """Returns the length in tokens of the longest sequence that fits in `num_blocks`. It is a
        multiple of the block size, or `max_model_len`.
        """
        lengths = range(self.block_size, self.max_model_len + 1, self.block_size)
        if self.blocks_of(self.max_model_len) <= num_blocks:
            return self.max_model_len
        return self.block_size * bisect_right(lengths, num_blocks, key=self.blocks_of)


@dataclass(frozen=True, slots=True)
class KVCacheMemory:
    """The settings for the KV cache's size: `num_blocks` or, if it is None, a number of bytes. If
    both are None, the size is computed from `free`.
    """

    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    free: FreeMemory


@dataclass(frozen=True, slots=True)
class KVCacheSizing:
    """The number of blocks in the KV cache (including the null block), a sentence that explains it,
    and the maximum length of a sequence.
    """

    num_blocks: int
    max_model_len: int
    explanation: str


def size_kv_cache(demand: KVCacheDemand, memory: KVCacheMemory) -> KVCacheSizing:
    """Computes the number of blocks for this demand.

    If the settings do not name `max_model_len`, it is lowered until one sequence of this length
    fits. Raises KVCacheTooSmall if not even one sequence of the configured length, or of a single
    block, fits. Raises NotEnoughMemory if the settings demand more memory than is available.
    """
    num_blocks, reason = _num_blocks(demand, memory)
    _check_there_is(num_blocks * demand.bytes_per_block, reason, memory.free)
    capacity = demand.longest_within(num_blocks - _NULL_BLOCKS)
    length = demand.max_model_len
    if capacity < length:
        if demand.max_model_len_asked or capacity < max(demand.block_size, _SHORTEST_SEQUENCE):
            needed = (demand.blocks_of(length) + _NULL_BLOCKS) * demand.bytes_per_block
            raise KVCacheTooSmall(
                f"the KV cache cannot store one sequence of {length} tokens: that needs "
                f"{_mib(needed)}, but the cache has {reason}; lower max_model_len or give the "
                "cache more memory"
            )
        length = capacity
        reason += f"; max_model_len lowered from {demand.max_model_len} to {length} to fit"
    size = _mib(num_blocks * demand.bytes_per_block)
    return KVCacheSizing(
        num_blocks, length, f"{num_blocks} blocks of {demand.block_size} tokens, {size}: {reason}"
    )


def _num_blocks(demand: KVCacheDemand, memory: KVCacheMemory) -> tuple[int, str]:
    if memory.num_blocks is not None:
        return memory.num_blocks, f"num_blocks {memory.num_blocks}"
    if memory.kv_cache_memory_bytes is not None:
        size = memory.kv_cache_memory_bytes
        return size // demand.bytes_per_block, f"kv_cache_memory_bytes {_mib(size)}"
    free = memory.free
    share = int(free.of_bytes * free.utilization)
    size = max(share - free.used_bytes - free.activation_bytes, 0)
    used = f"{_mib(free.used_bytes)} in use and " if free.used_bytes else ""
    num_fitting = size // demand.bytes_per_block
    reason = (
        f"{_mib(size)}, which is {free.utilization:.0%} of {_mib(free.of_bytes)} {free.of_what}, "
        f"less {used}{_mib(free.activation_bytes)} for activations"
    )
    if num_fitting <= demand.most_blocks:
        return num_fitting, reason
    return demand.most_blocks, (
        f"what {demand.max_num_seqs} sequences of {demand.max_model_len} tokens can use; "
        f"{num_fitting} would fit in {reason}"
    )


def _check_there_is(size: int, reason: str, free: FreeMemory) -> None:
    there = max(free.of_bytes - free.used_bytes, 0)
    if size > there:
        raise NotEnoughMemory(
            f"the KV cache needs {_mib(size)} ({reason}), but only {_mib(there)} are available; "
            "lower num_blocks, kv_cache_memory_bytes, max_num_seqs or max_model_len"
        )


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
