"""The KV cache has its configured size, or fills the memory up to what a full batch can use."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.backends.out_of_memory import NotEnoughMemory, memory_for
from services.worker.core.errors import KVCacheTooSmall
from services.worker.core.kv.free_memory import FreeMemory
from services.worker.core.kv.kv_cache import KVCacheDemand, KVCacheMemory, size_kv_cache
from services.worker.core.kv.kv_groups import LayerGroup
from services.worker.platforms.machine import available_memory_bytes

MIB = 2**20
DEMAND = KVCacheDemand(
    bytes_per_block=MIB,
    block_size=16,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=160,
    max_model_len_asked=True,
    groups=(LayerGroup(None, (0, 1)),),
)
FREE = FreeMemory(of_bytes=80 * MIB, utilization=0.5, activation_bytes=10 * MIB)
MEMORY = KVCacheMemory(num_blocks=None, kv_cache_memory_bytes=None, free=FREE)


def test_the_cache_is_a_fraction_of_available_memory_minus_activations() -> None:
    sizing = size_kv_cache(DEMAND, MEMORY)
    assert sizing.num_blocks == 30
    assert sizing.max_model_len == 160
    assert sizing.explanation == (
        "30 blocks of 16 tokens, 30.0 MiB: 30.0 MiB, which is 50% of 80.0 MiB available after "
        "loading, less 10.0 MiB for activations"
    )


def test_the_cache_is_a_fraction_of_the_device_minus_memory_in_use() -> None:
    free = replace(FREE, of_bytes=100 * MIB, used_bytes=25 * MIB, of_what="of the GPU")
    sizing = size_kv_cache(DEMAND, replace(MEMORY, free=free))
    assert sizing.explanation == (
        "15 blocks of 16 tokens, 15.0 MiB: 15.0 MiB, which is 50% of 100.0 MiB of the GPU, less "
        "25.0 MiB in use and 10.0 MiB for activations"
    )


def test_never_more_than_a_full_batch_and_the_null_block() -> None:
    sizing = size_kv_cache(DEMAND, replace(MEMORY, free=replace(FREE, of_bytes=1000 * MIB)))
    assert sizing.num_blocks == 4 * 10 + 1
    assert "what 4 sequences of 160 tokens can use; 490 would fit in" in sizing.explanation


def test_memory_given_in_bytes() -> None:
    sizing = size_kv_cache(DEMAND, replace(MEMORY, kv_cache_memory_bytes=20 * MIB + 5))
    assert sizing.num_blocks == 20
    assert "kv_cache_memory_bytes 20.0 MiB" in sizing.explanation


def test_blocks_given_by_number() -> None:
    assert size_kv_cache(DEMAND, replace(MEMORY, num_blocks=12)).num_blocks == 12


@pytest.mark.parametrize("asked", [{"num_blocks": 70}, {"kv_cache_memory_bytes": 70 * MIB}])
def test_a_configured_size_may_exceed_a_full_batch(asked: dict[str, int]) -> None:
    assert size_kv_cache(DEMAND, replace(MEMORY, **asked)).num_blocks == 70


def test_the_null_block_holds_nothing() -> None:
    assert size_kv_cache(DEMAND, replace(MEMORY, num_blocks=11)).max_model_len == 160
    with pytest.raises(KVCacheTooSmall) as caught:
        size_kv_cache(DEMAND, replace(MEMORY, num_blocks=10))
    assert caught.value.message == (
        "the KV cache cannot store one sequence of 160 tokens: that needs 11.0 MiB, but the "
        "cache has num_blocks 10; lower max_model_len or give the cache more memory"
    )


def test_a_length_that_is_not_set_is_lowered_to_fit() -> None:
    demand = replace(DEMAND, max_model_len_asked=False)
    sizing = size_kv_cache(demand, replace(MEMORY, num_blocks=6))
    assert (sizing.num_blocks, sizing.max_model_len) == (6, 80)
    assert "max_model_len lowered from 160 to 80 to fit" in sizing.explanation


def test_no_room_for_a_single_block() -> None:
    demand = replace(DEMAND, max_model_len_asked=False)
    with pytest.raises(KVCacheTooSmall):
        size_kv_cache(demand, replace(MEMORY, free=replace(FREE, activation_bytes=900 * MIB)))


@pytest.mark.parametrize("asked", [{"num_blocks": 30}, {"kv_cache_memory_bytes": 30 * MIB}])
def test_a_cache_that_is_larger_than_the_memory_is_refused(asked: dict[str, int]) -> None:
    memory = replace(MEMORY, **asked, free=replace(FREE, of_bytes=30 * MIB, used_bytes=MIB))
    with pytest.raises(NotEnoughMemory) as caught:
        size_kv_cache(DEMAND, memory)
    assert caught.value.message.startswith("the KV cache needs 30.0 MiB (")
    assert caught.value.message.endswith(
        "), but only 29.0 MiB are available; lower num_blocks, kv_cache_memory_bytes, max_num_seqs "
        "or max_model_len"
    )


def test_what_cannot_be_allocated_is_one_sentence() -> None:
    def too_much_for_torch() -> object:
        return torch.empty(2**60, dtype=torch.uint8)

    def too_much_for_numpy() -> object:
        return np.empty(2**60, dtype=np.uint8)

    for allocate in (too_much_for_torch, too_much_for_numpy):
        with (
            pytest.raises(NotEnoughMemory) as caught,
            memory_for("the KV cache", "lower num_blocks"),
        ):
            allocate()
        assert caught.value.message == (
            "there is not enough memory for the KV cache; lower num_blocks"
        )
    with pytest.raises(RuntimeError, match="sizes"), memory_for("a step", "lower max_num_seqs"):
        torch.zeros(2).expand(3)


HYBRID = (LayerGroup(None, (3,)), LayerGroup(33, (0,)), LayerGroup(33, (1,)))
"""For 160 tokens, the first group needs 10 blocks, and each of the others 7: 6 blocks for the
window's 32 tokens and two steps of 32 tokens, and one more because blocks may be partly used.
"""


def test_a_window_holds_no_more_than_it_shows_and_two_steps() -> None:
    demand = replace(DEMAND, groups=HYBRID, max_num_batched_tokens=32)
    assert demand.blocks_of(160) == 10 + 7 + 7
    assert demand.blocks_of(40) == 3 + 3 + 3
    memory = replace(MEMORY, free=replace(FREE, of_bytes=1000 * MIB))
    assert size_kv_cache(demand, memory).num_blocks == 4 * 24 + 1


def test_a_length_is_lowered_to_what_all_groups_hold() -> None:
    demand = replace(DEMAND, groups=HYBRID, max_num_batched_tokens=32, max_model_len_asked=False)
    assert size_kv_cache(demand, replace(MEMORY, num_blocks=25)).max_model_len == 160
    assert size_kv_cache(demand, replace(MEMORY, num_blocks=24)).max_model_len == 144
    assert size_kv_cache(demand, replace(MEMORY, num_blocks=10)).max_model_len == 48


def test_available_memory_is_the_machines_within_the_control_groups_limit(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_memory_bytes(proc, cgroup) == 5000 * 1024
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000000\n")
    assert available_memory_bytes(proc, cgroup) == 5000 * 1024
    (cgroup / "memory.max").write_text("3000000\n")
    (cgroup / "memory.stat").write_text("anon 5\ninactive_file 250000\n")
    assert available_memory_bytes(proc, cgroup) == 2_250_000


def test_a_group_around_the_processs_own_may_set_the_limit(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 5000 kB\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/machine/service\n")
    (tmp_path / "machine/service").mkdir(parents=True)
    (tmp_path / "machine/memory.max").write_text("1000000\n")
    (tmp_path / "machine/memory.current").write_text("400000\n")
    assert available_memory_bytes(tmp_path, tmp_path) == 600_000


def test_available_memory_under_the_first_version_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 5000 kB\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("2000000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("500000\n")
    assert available_memory_bytes(tmp_path, tmp_path) == 1_500_000
