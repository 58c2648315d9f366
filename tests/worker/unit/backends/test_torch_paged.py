"""torch's paged attention equals explicit attention over one sequence at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.worker.backends.attention import AttentionLayer, AttentionShape, Rotation, StepLayout
from services.worker.backends.torch.attend import MOST_ROWS, rotate
from services.worker.backends.torch.paged_attention import TorchPagedAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
PLAIN = AttentionLayer(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, scale=HEAD_DIM**-0.5)


def shape_of(block_size: int, num_blocks: int, layer: AttentionLayer = PLAIN) -> AttentionShape:
    return AttentionShape((layer,), block_size, num_blocks, torch.float32)


class Sequence:
    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = block_ids
        self.keys = torch.empty(0, NUM_KV_HEADS, HEAD_DIM)
        self.values = torch.empty(0, NUM_KV_HEADS, HEAD_DIM)


def attend_plainly(
    queries: torch.Tensor, sequence: Sequence, layer: AttentionLayer
) -> torch.Tensor:
    """Softmax attention of a sequence's last tokens, computed query by query and head by head."""
    context = len(sequence.keys) - len(queries)
    output = torch.empty(len(queries), NUM_HEADS, HEAD_DIM)
    for index, query in enumerate(queries):
        last = context + index + 1
        seen = slice(0 if layer.window is None else max(last - layer.window, 0), last)
        for head in range(NUM_HEADS):
            group = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = sequence.keys[seen, group] @ query[head] * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            output[index, head] = torch.softmax(scores, dim=0) @ sequence.values[seen, group]
    return output.flatten(1)


def layout_of(sequences: list[Sequence], counts: list[int], block_size: int) -> StepLayout:
    width = max(len(sequence.block_ids) for sequence in sequences)
    tables = np.full((len(sequences), width), 10_000, np.int32)
    for row, sequence in enumerate(sequences):
        tables[row, : len(sequence.block_ids)] = sequence.block_ids
    return StepLayout(
        num_decodes=sum(count == 1 for count in counts),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([len(sequence.keys) for sequence in sequences], np.int32),
        rows=np.arange(len(sequences), dtype=np.int32),
        tables=tables,
        block_size=block_size,
    )


def run_step(
    attention: TorchPagedAttention,
    sequences: list[Sequence],
    counts: list[int],
    block_size: int,
    layer: AttentionLayer = PLAIN,
) -> None:
    """Computes `counts[i]` tokens of sequence i, with padding, and checks the results."""
    total, padding = sum(counts), 3
    queries = torch.randn(total + padding, NUM_HEADS, HEAD_DIM)
    keys, values = torch.randn(2, total + padding, NUM_KV_HEADS, HEAD_DIM).unbind(0)
    first = 0
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.keys = torch.cat((sequence.keys, keys[first : first + count]))
        sequence.values = torch.cat((sequence.values, values[first : first + count]))
        first += count
    step = attention.begin_step([layout_of(sequences, counts, block_size)])
    output = step(0, queries, keys, values, None)
    assert output.shape == (total + padding, NUM_HEADS * HEAD_DIM)
    assert output.isfinite().all()
    first = 0
    for sequence, count in zip(sequences, counts, strict=True):
        expected = attend_plainly(queries[first : first + count], sequence, layer)
        torch.testing.assert_close(output[first : first + count], expected, atol=1e-5, rtol=1e-4)
        first += count


@pytest.mark.parametrize(
    "layer",
    [PLAIN, replace(PLAIN, window=17), replace(PLAIN, softcap=0.5, window=70, scale=0.7)],
    ids=["full", "window", "softcap"],
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "not invariant"])
def test_decodes_of_different_lengths_share_a_step_with_chunks(
    batch_invariant: bool, block_size: int, layer: AttentionLayer
) -> None:
    torch.manual_seed(1)
    lengths = [1, 3, 30, 31, 65, 64, 150]
    blocks = np.random.default_rng(0).permutation(np.arange(1, 1 + 7 * 320)).tolist()
    sequences = [Sequence(blocks[320 * i : 320 * (i + 1)]) for i in range(len(lengths))]
    shape = shape_of(block_size, 1 + 7 * 320, layer)
    attention = TorchPagedAttention(shape, batch_invariant=batch_invariant)
    # Prompts, of which one has a single token.
    run_step(attention, sequences[:1], [1], block_size, layer)
    run_step(attention, sequences[1:], lengths[1:], block_size, layer)
    # Decodes by increasing length, then chunks of prompts whose beginnings were computed. One chunk
    # is longer than MOST_ROWS.
    order = [0, 1, 2, 4, 5, 3, 6]
    mixed = [sequences[index] for index in order]
    run_step(attention, mixed, [1, 1, 1, 1, 9, MOST_ROWS + 5, 2], block_size, layer)
    # A step with decodes only.
    mixed.sort(key=lambda sequence: len(sequence.keys))
    run_step(attention, mixed, [1] * 7, block_size, layer)


@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "not invariant"])
def test_stale_values_in_a_block_do_not_change_results(batch_invariant: bool) -> None:
    torch.manual_seed(3)
    attention = TorchPagedAttention(shape_of(4, 41), batch_invariant=batch_invariant)
    broken = Sequence(list(range(1, 41)))
    broken.keys = broken.values = torch.full((160, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    step = attention.begin_step([layout_of([broken], [160], 4)])
    step(0, torch.randn(160, NUM_HEADS, HEAD_DIM), broken.keys, broken.values, None)

    sequences = [Sequence(list(range(1 + 8 * i, 9 + 8 * i))) for i in range(3)]
    run_step(attention, sequences, [5, 9, 14], 4)
    for _ in range(5):
        run_step(attention, sequences, [1, 1, 1], 4)


def test_decodes_over_a_group_limit_are_cut() -> None:
    torch.manual_seed(2)
    sequences = [Sequence(list(range(1 + 8 * i, 9 + 8 * i))) for i in range(5)]
    attention = TorchPagedAttention(shape_of(4, 41), max_group_tokens=64)
    for sequence, length in zip(sequences, [20, 21, 22, 30, 31], strict=True):
        run_step(attention, [sequence], [length], 4)
    run_step(attention, sequences, [1] * 5, 4)


def test_keys_and_queries_are_rotated_before_they_meet() -> None:
    """The reference uses complex numbers. The last two elements of a head are not rotated."""
    torch.manual_seed(4)
    angles = torch.rand(9, 3)
    heads = torch.randn(9, 2, HEAD_DIM)
    turned = torch.complex(heads[..., :3], heads[..., 3:6]) * torch.polar(
        torch.ones(9, 1, 3), angles[:, None]
    )
    expected = torch.cat((turned.real, turned.imag, heads[..., 6:]), dim=-1)
    rotation = Rotation(angles.cos(), angles.sin())
    torch.testing.assert_close(rotate(heads, rotation), expected)

    sequence = Sequence([1, 2, 3])
    queries = torch.randn(9, NUM_HEADS, HEAD_DIM)
    sequence.keys, sequence.values = expected, torch.randn(9, 2, HEAD_DIM)
    step = TorchPagedAttention(shape_of(4, 4)).begin_step([layout_of([sequence], [9], 4)])
    output = step(0, queries, heads, sequence.values, rotation)
    torch.testing.assert_close(
        output, attend_plainly(rotate(queries, rotation), sequence, PLAIN), atol=1e-5, rtol=1e-4
    )


def test_only_zeroed_blocks_change() -> None:
    torch.manual_seed(2)
    attention = TorchPagedAttention(shape_of(4, 8))
    first = Sequence([1, 2, 3])
    run_step(attention, [first], [9], 4)
    attention.zero_blocks(np.array([2, 7], np.int32))
    first.keys[4:8] = first.values[4:8] = 0
    run_step(attention, [first], [1], 4)


def test_zeroed_blocks_are_clear_in_every_layer() -> None:
    attention = TorchPagedAttention(AttentionShape((PLAIN, PLAIN), 4, 4, torch.float32))
    stale = torch.full((8, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    sequence = Sequence([1, 2])
    sequence.keys = stale
    step = attention.begin_step([layout_of([sequence], [8], 4)])
    for layer in range(2):
        step(layer, torch.ones(8, NUM_HEADS, HEAD_DIM), stale.clone(), stale.clone(), None)
    attention.zero_blocks(np.array([1, 2], np.int32))
    # Another request, of nine tokens, gets the two zeroed blocks. Only its last token is computed.
    sequence = Sequence([1, 2, 3])
    sequence.keys = torch.empty(9, NUM_KV_HEADS, HEAD_DIM)
    step = attention.begin_step([layout_of([sequence], [1], 4)])
    new = torch.ones(1, NUM_KV_HEADS, HEAD_DIM)
    for layer in range(2):
        output = step(layer, torch.zeros(1, NUM_HEADS, HEAD_DIM), new.clone(), new.clone(), None)
        # All scores are equal, so the output is the mean of eight zeros and a one.
        torch.testing.assert_close(output, torch.full_like(output, 1 / 9))


@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "not invariant"])
def test_groups_share_pages_and_a_window_reads_only_its_own_keys(batch_invariant: bool) -> None:
    """There are two KV-cache groups of one layer. The first one attends to all tokens, the second
    one to the last five. Blocks outside the window belong to another request and contain NaN.
    """
    torch.manual_seed(5)
    windowed = replace(PLAIN, window=5)
    shape = AttentionShape((PLAIN, windowed), 4, 16, torch.float32, groups=((0,), (1,)))
    attention = TorchPagedAttention(shape, batch_invariant=batch_invariant)
    assert len(shape.page_layers) == 1
    whole, shown = Sequence([2, 3, 4, 5]), Sequence([6, 7, 8, 9])
    for count in (9, 1, 3, 1):
        for sequence in (whole, shown):
            new = torch.randn(2, count, NUM_KV_HEADS, HEAD_DIM)
            sequence.keys = torch.cat((sequence.keys, new[0]))
            sequence.values = torch.cat((sequence.values, new[1]))
        first_shown = max(len(shown.keys) - count - 5 + 1, 0) // 4
        attention.zero_blocks(np.array(shown.block_ids[:first_shown], np.int32))
        shown.block_ids[:first_shown] = [15] * first_shown
        step = attention.begin_step([layout_of([seq], [count], 4) for seq in (whole, shown)])
        for layer, sequence in enumerate((whole, shown)):
            query = torch.randn(count, NUM_HEADS, HEAD_DIM)
            parts = (sequence.keys[-count:], sequence.values[-count:])
            output = step(layer, query, parts[0].clone(), parts[1].clone(), None)
            expected = attend_plainly(query, sequence, shape.layers[layer])
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
        poison(attention, 15)


def poison(attention: TorchPagedAttention, block_id: int) -> None:
    """Fills a block with NaN in the pages of both groups, as if another request had written it."""
    broken = Sequence([block_id])
    broken.keys = broken.values = torch.full((4, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    step = attention.begin_step([layout_of([broken], [4], 4)] * 2)
    for layer in range(2):
        keys, values = broken.keys.clone(), broken.values.clone()
        step(layer, torch.randn(4, NUM_HEADS, HEAD_DIM), keys, values, None)
