"""The host-memory tier for offloaded KV blocks, with torch's and the native kernels' caches."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.worker.backends.attention import AttentionLayer, AttentionShape, PagedAttention
from services.worker.backends.choices import KVCacheDtype
from services.worker.backends.torch.paged_attention import TorchPagedAttention
from services.worker.core.step import EndedTierLoad, TierBlocks, TierLoad
from services.worker.options.tier.kv_tier import KVTier, tier_memory
from tests.worker.conftest import Native
from tests.worker.runner_driver import ints

SHAPES = {
    kv_cache_dtype: AttentionShape(
        layers=(AttentionLayer(4, 2, 8, 1.0), AttentionLayer(4, 2, 16, 1.0)),
        block_size=4,
        num_blocks=9,
        dtype=torch.float32,
        kv_cache_dtype=kv_cache_dtype,
    )
    for kv_cache_dtype in KVCacheDtype
}


@pytest.fixture(params=SHAPES, ids=lambda kv_cache_dtype: kv_cache_dtype.value)
def shape(request: pytest.FixtureRequest) -> AttentionShape:
    return SHAPES[request.param]


@pytest.fixture(params=["torch", "native"])
def attention(
    request: pytest.FixtureRequest, native: Native, shape: AttentionShape
) -> PagedAttention:
    """A KV cache whose blocks have different contents."""
    made: dict[str, Callable[[], PagedAttention]] = {
        "torch": lambda: TorchPagedAttention(shape),
        "native": lambda: native.kernels.paged_attention(shape),
    }
    attention = made[request.param]()
    fill(attention, seed=1)
    return attention


def fill(attention: PagedAttention, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for pages in attention.pages:
        pages.copy_(100 * torch.rand(pages.shape, generator=generator))


def contents(attention: PagedAttention, *blocks: int) -> list[torch.Tensor]:
    return [pages[:, list(blocks)].clone() for pages in attention.pages]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def key(number: int) -> bytes:
    return number.to_bytes(36, "big")


def blocks(*pairs: tuple[int, int], keys: list[int] | None = None) -> TierBlocks:
    """Transfers between pairs of a cache block and a tier block. `keys` are the keys of the tier's
    blocks, by default the numbers of these blocks.
    """
    return TierBlocks(
        ints(*(mine for mine, _ in pairs)),
        ints(*(theirs for _, theirs in pairs)),
        tuple(map(key, keys or [theirs for _, theirs in pairs])),
    )


def make_tier(attention: PagedAttention) -> KVTier:
    size = sum(pages[:, 0].nbytes for pages in attention.pages)
    return KVTier(tier_memory(6, size), attention.pages)


def load(tier: KVTier, wanted: TierBlocks) -> EndedTierLoad:
    tier.begin_loads([TierLoad(7, wanted)])
    while not (ended := tier.take_ended(is_idle=True)):
        pass
    (only,) = ended
    return only


def test_blocks_come_back_into_any_other_blocks(attention: PagedAttention) -> None:
    tier, before = make_tier(attention), contents(attention, 1, 2, 3, 6)
    tier.store(blocks((1, 2), (2, 3), (3, 4), (6, 0)))
    fill(attention, seed=2)
    untouched = contents(attention, 1, 2, 3, 4)
    ended = load(tier, blocks((5, 2), (6, 3), (7, 4), (8, 0)))
    assert (ended.request, len(ended.invalid_block_ids)) == (7, 0)
    assert same(contents(attention, 5, 6, 7, 8), before)
    assert same(contents(attention, 1, 2, 3, 4), untouched)


@pytest.mark.parametrize("byte", [0, -36])
def test_a_flipped_bit_is_found_and_the_other_blocks_are_loaded(
    attention: PagedAttention, byte: int
) -> None:
    tier, before = make_tier(attention), contents(attention, 1, 3)
    tier.store(blocks((1, 0), (2, 1), (3, 2)))
    tier.memory[1, byte] ^= 1
    fill(attention, seed=2)
    untouched = contents(attention, 6)
    ended = load(tier, blocks((5, 0), (6, 1), (7, 2)))
    assert ended.invalid_block_ids.tolist() == [6]
    assert same(contents(attention, 5, 7), before)
    assert same(contents(attention, 6), untouched)


def test_a_block_that_holds_nothing_or_something_else_is_not_loaded(
    attention: PagedAttention,
) -> None:
    tier = make_tier(attention)
    tier.store(blocks((1, 0), (2, 1)))
    ended = load(tier, blocks((5, 0), (6, 1), (7, 2), keys=[0, 9, 2]))
    assert ended.invalid_block_ids.tolist() == [6, 7]


def test_a_block_of_the_tier_can_be_stored_anew(attention: PagedAttention) -> None:
    tier = make_tier(attention)
    tier.store(blocks((1, 3), keys=[1]))
    tier.store(blocks((2, 3), keys=[2]))
    before = contents(attention, 2)
    assert load(tier, blocks((5, 3), keys=[1])).invalid_block_ids.tolist() == [5]
    assert not len(load(tier, blocks((5, 3), keys=[2])).invalid_block_ids)
    assert same(contents(attention, 5), before)


def test_a_reset_waits_for_loads_and_forgets_that_they_ended(attention: PagedAttention) -> None:
    tier = make_tier(attention)
    tier.store(blocks((1, 0)))
    before = contents(attention, 1)
    tier.begin_loads([TierLoad(number, blocks((5, 0))) for number in range(50)])
    tier.reset()
    assert same(contents(attention, 5), before)
    assert tier.take_ended(is_idle=False) == ()
    assert not len(load(tier, blocks((6, 0))).invalid_block_ids), "what was stored is still there"


def test_the_memory_is_as_large_as_the_blocks(
    shape: AttentionShape, attention: PagedAttention
) -> None:
    memory = tier_memory(6, shape.bytes_per_block)
    size = (16 + 4) + (16 + 4) if shape.has_codes else (8 + 16) * 4
    assert memory.shape == (6, 4 * 2 * 2 * size)
    assert size * 4 * 2 * 2 == sum(pages[:, 0].nbytes for pages in attention.pages)
    assert memory.dtype == np.uint8
