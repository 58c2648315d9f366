"""Layers with the same kind of attention form KV-cache groups of about equal size."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.worker.backends.attention import AttentionLayer, AttentionShape
from services.worker.backends.choices import KVCacheDtype
from services.worker.core.kv.kv_groups import (
    LayerGroup,
    LayerKind,
    block_scales,
    group_layers,
    layer_kinds,
    state_block_sizes,
)


def kinds(windows: Sequence[int | None]) -> list[LayerKind]:
    return [LayerKind(window) for window in windows]


def test_layers_that_see_alike_are_one_group() -> None:
    assert group_layers(kinds([None, None, None])) == (LayerGroup(None, (0, 1, 2)),)
    assert group_layers(kinds([64, 64])) == (LayerGroup(64, (0, 1)),)


def test_as_many_of_each_kind_make_a_group_of_each() -> None:
    assert group_layers(kinds([64, None, 64, None])) == (
        LayerGroup(64, (0, 2)),
        LayerGroup(None, (1, 3)),
    )


def test_five_with_a_window_to_one_without_make_six_groups() -> None:
    windows = [None if index % 6 == 5 else 512 for index in range(12)]
    groups = group_layers(kinds(windows))
    assert [group.window for group in groups] == [512] * 5 + [None]
    assert groups[0].layers == (0, 6)
    assert groups[4].layers == (4, 10)
    assert groups[5].layers == (5, 11)


def test_the_last_groups_of_a_kind_may_not_be_full() -> None:
    windows = [None if index % 6 == 5 else 1024 for index in range(62)]
    groups = group_layers(kinds(windows))
    assert [len(group.layers) for group in groups] == [9, 9, 9, 9, 8, 8, 10]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(62))


def test_almost_as_many_are_padded_rather_than_cut() -> None:
    groups = group_layers(kinds([32, None] * 3 + [32]))
    assert [len(group.layers) for group in groups] == [4, 3]


@pytest.mark.parametrize("num_layers", [4, 7])
def test_groups_share_the_pages_of_a_block(num_layers: int) -> None:
    groups = group_layers(kinds([16 if index % 3 else None for index in range(num_layers)]))
    layer = AttentionLayer(4, 2, 8, 1.0)
    shape = AttentionShape(
        (layer,) * num_layers, 4, 10, torch.float32, groups=tuple(g.layers for g in groups)
    )
    assert len(shape.page_layers) == max(len(group.layers) for group in groups)
    assert shape.bytes_per_block == len(shape.page_layers) * 4 * 2 * 2 * 8 * 4
    assert len(set(zip(shape.group_of, shape.pages_of, strict=True))) == num_layers


NARROW = AttentionLayer(8, 4, 16, 1.0, window=8)
WIDE = AttentionLayer(8, 1, 32, 1.0)
"""A layer whose keys take half of the memory of NARROW's keys."""


def test_keys_of_another_shape_make_a_group_with_more_tokens_in_blocks_of_the_same_size() -> None:
    groups = group_layers(layer_kinds([NARROW, NARROW, WIDE]))
    assert groups == (LayerGroup(8, (0,)), LayerGroup(8, (1,)), LayerGroup(None, (2,), None, 2))
    assert block_scales(groups) == (1, 1, 2)
    sizes = [group.kv_cache_group(16, 500).block_size for group in groups]
    assert sizes == [16, 16, 32]
    shape = AttentionShape(
        (NARROW, NARROW, WIDE),
        16,
        num_blocks=3,
        dtype=torch.float32,
        groups=tuple(group.layers for group in groups),
        block_scales=block_scales(groups),
    )
    assert shape.bytes_per_block == 2 * 16 * 4 * 16 * 4
    allocated = [torch.empty(shape.page_shape(layer)) for layer in shape.page_layers]
    views = shape.layer_pages(allocated)
    assert [tuple(view.shape) for view in views] == [(2, 3, 16, 4, 16)] * 2 + [(2, 3, 32, 1, 32)]
    assert {view.data_ptr() for view in views} == {allocated[0].data_ptr()}


def test_keys_of_another_shape_and_as_many_bytes_have_blocks_of_as_many_tokens() -> None:
    narrow = replace(NARROW, num_kv_heads=2)
    groups = group_layers(layer_kinds([narrow, WIDE]))
    assert groups == (LayerGroup(8, (0,)), LayerGroup(None, (1,)))
    assert block_scales(groups) == ()


def test_keys_whose_bytes_are_no_multiples_are_one_group_without_windows() -> None:
    uneven = replace(NARROW, num_kv_heads=3)
    assert layer_kinds([uneven, WIDE]) == [LayerKind(), LayerKind()]
    assert layer_kinds([NARROW, WIDE], scales_blocks=False) == [LayerKind(), LayerKind()]
    # In 8 bits, each head takes 4 more bytes for a scale. So the ratio is 4 * 20 to 1 * 36.
    codes = KVCacheDtype.INT8_PER_TOKEN_HEAD
    assert layer_kinds([NARROW, WIDE], codes) == [LayerKind(), LayerKind()]


def test_one_window_needs_one_group_whatever_the_shapes_are() -> None:
    other = replace(WIDE, window=8)
    assert group_layers(layer_kinds([NARROW, other])) == (LayerGroup(8, (0, 1)),)
    assert layer_kinds([NARROW, NARROW]) == [LayerKind(8), LayerKind(8)]


def test_recurrent_layers_make_groups_of_their_own_as_large_as_those_that_attend() -> None:
    groups = group_layers(kinds([None, None]), 6)
    assert groups == (
        LayerGroup(None, (0, 1)),
        LayerGroup(None, (0, 3), MambaCacheMode.ALIGN),
        LayerGroup(None, (1, 4), MambaCacheMode.ALIGN),
        LayerGroup(None, (2, 5), MambaCacheMode.ALIGN),
    )
    assert [group.holds_states for group in groups] == [False, True, True, True]


def test_a_state_that_is_overwritten_has_a_block_for_the_longest_sequence() -> None:
    attending, kept = group_layers(kinds([None]), 1, MambaCacheMode.NONE)
    assert attending.kv_cache_group(16, 500) == KVCacheGroup(AttentionType.FULL, 16)
    assert kept.kv_cache_group(16, 500) == KVCacheGroup(AttentionType.STATE_SPACE, 500)
    assert state_block_sizes((attending, kept), 16, 500) == (500,)
    aligned = group_layers(kinds([None]), 1)[1].kv_cache_group(16, 500)
    assert (aligned.block_size, aligned.mamba_cache_mode) == (16, MambaCacheMode.ALIGN)
