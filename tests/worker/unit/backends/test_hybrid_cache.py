"""Recurrent layers' states are stored in KV-cache blocks, in the memory of keys and values."""

import numpy as np
import pytest
import torch

from services.worker.backends.attention import (
    AttentionLayer,
    AttentionShape,
    StateLayer,
    StepLayout,
)
from services.worker.backends.hybrid_cache import HybridCache, StateRun, state_runs
from services.worker.backends.torch.paged_attention import TorchPagedAttention
from tests.worker.runner_driver import ints

LAYER = AttentionLayer(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)
SMALL = StateLayer((((3, 2), torch.float32), ((5,), torch.float32)))
LARGE = StateLayer((((3, 2), torch.bfloat16), ((10, 10), torch.float32)))


def shape(state: StateLayer, num_states: int = 1, **changes: int) -> AttentionShape:
    """One attention layer, and `num_states` KV-cache groups of one recurrent layer each."""
    sizes = {"block_size": 4, "num_blocks": 6, **changes}
    groups = tuple((index,) for index in range(num_states))
    return AttentionShape(
        (LAYER,), dtype=torch.float32, states=(state,) * num_states, state_groups=groups, **sizes
    )


def cache(of: AttentionShape) -> HybridCache:
    return HybridCache(TorchPagedAttention(of), of)


def states(state: StateLayer, count: int) -> list[torch.Tensor]:
    return [torch.randn(count, *size).to(dtype) for size, dtype in state.tensors]


def blocks(*ids: int) -> tuple[torch.Tensor, ...]:
    return (torch.tensor(ids),)


@pytest.mark.parametrize("state", [SMALL, LARGE], ids=["smaller", "larger than keys and values"])
def test_a_state_is_read_as_it_was_written(state: StateLayer) -> None:
    holder, written = cache(shape(state)), states(state, 2)
    holder.write(0, StateRun(slice(0, 2), 2, None, blocks(4, 2)), written)
    other = states(state, 1)
    holder.write(0, StateRun(slice(0, 1), 1, None, blocks(3)), other)
    read = holder.read(0, StateRun(slice(0, 3), 3, blocks(2, 3, 4), blocks(1, 1, 1)))
    assert read is not None
    for tensor, first, second in zip(read, written, other, strict=True):
        assert tensor.dtype == first.dtype
        assert torch.equal(tensor, torch.stack([first[1], second[0], first[0]]))


def test_sequences_that_begin_have_no_state() -> None:
    assert cache(shape(SMALL)).read(0, StateRun(slice(0, 1), 1, None, blocks(1))) is None


def test_a_block_holds_either_keys_and_values_or_a_state() -> None:
    of = shape(SMALL)
    attention = TorchPagedAttention(of)
    holder = HybridCache(attention, of)
    attention.pages[0].fill_(1.0)
    holder.write(0, StateRun(slice(0, 1), 1, None, blocks(3)), states(SMALL, 1))
    changed = (attention.pages[0] != 1.0).any(0).flatten(1).any(1)
    assert changed.tolist() == [False, False, False, True, False, False]
    assert of.bytes_per_block == 2 * 4 * 8 * 4  # the bytes of keys and values only
    holder.zero_blocks(ints(3))
    assert not attention.pages[0][:, 3].any()


def test_the_larger_of_both_is_the_size_of_a_block() -> None:
    of = shape(LARGE)
    assert LARGE.num_bytes == 6 * 2 + 100 * 4
    assert of.bytes_per_block == LARGE.num_bytes > 2 * 4 * 8 * 4
    # A state needs 512 bytes, which a block of 8 tokens has. Blocks of 4 tokens have only 256.
    assert of.block_size_for_states == 8
    assert shape(SMALL).block_size_for_states == 4


def test_groups_of_states_have_tables_of_their_own() -> None:
    holder = cache(shape(SMALL, num_states=2))
    first, second = states(SMALL, 1), states(SMALL, 1)
    run = StateRun(slice(0, 1), 1, (*blocks(1), *blocks(2)), (*blocks(1), *blocks(2)))
    holder.write(0, run, first)
    holder.write(1, run, second)
    for layer, written in enumerate((first, second)):
        read = holder.read(layer, run)
        assert read is not None
        assert all(map(torch.equal, read, written))


def test_blocks_are_copied_one_after_the_other() -> None:
    holder, written = cache(shape(LARGE)), states(LARGE, 1)
    holder.write(0, StateRun(slice(0, 1), 1, None, blocks(1)), written)
    holder.write(0, StateRun(slice(0, 1), 1, None, blocks(4)), states(LARGE, 1))
    holder.copy_blocks(ints(1, 2), ints(2, 4))
    for block in (1, 2, 4):
        read = holder.read(0, StateRun(slice(0, 1), 1, blocks(block), blocks(block)))
        assert read is not None
        assert all(map(torch.equal, read, written))


def test_single_tokens_with_a_state_are_one_run_and_every_other_sequence_is_its_own() -> None:
    # Two prompts of one token, decodes after 4, 4 and 8 tokens, a chunk after 4, a prompt of two.
    counts, seq_lens = np.array([1, 1, 1, 1, 1, 3, 2]), ints(1, 1, 5, 5, 9, 7, 2)
    tables = np.arange(7 * 3, dtype=np.int32).reshape(7, 3) + 1
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    runs = state_runs([StepLayout(5, starts, seq_lens, ints(*range(7)), tables, 4)])
    assert [(run.tokens.start, run.tokens.stop, run.num_sequences) for run in runs] == [
        (2, 5, 3),
        (0, 1, 1),
        (1, 2, 1),
        (5, 8, 1),
        (8, 10, 1),
    ]
    sources = [None if run.sources is None else run.sources[0].tolist() for run in runs]
    assert sources == [[7, 10, 14], None, None, [16], None]
    assert [run.targets[0].tolist() for run in runs] == [[8, 11, 15], [1], [4], [17], [19]]
