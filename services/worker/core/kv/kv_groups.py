"""Divides the layers of a model into KV-cache groups. The layers of a group share a block table.
All groups share the memory of the KV cache.

Layers with the same attention window form a group, because the pool frees their blocks at the same
time. All groups get blocks from one pool, so a block must occupy the same memory in each group.
Therefore a group has as many layers as the rarest kind of layer, and each other kind of layer forms
several groups. A block has one page for each layer of its group, and the i-th layers of all groups
share their pages. This is the rule of vLLM's hybrid KV-cache manager.

If layers with different windows have keys of different sizes, as in Gemma 4, layers with smaller
keys have more tokens in a block: twice as many if the keys are half as large.

A group with fewer layers than other groups leaves pages of its blocks unused. For example, Gemma 3
27B has 52 layers with a window and 10 layers without. Groups have room for 10 layers. The layers
without windows form one group. The layers with windows form six groups of 8 or 9 layers, so 8 of 70
pages are unused. In return, the blocks for all tokens of a sequence are needed in one group only.
In each of the other six groups a sequence has at most a window's blocks.

Recurrent layers are one more kind of layer. A block of their groups stores one state of each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.worker.backends.attention import AttentionLayer, head_elements
from services.worker.backends.choices import KVCacheDtype

_PADDED_RATHER_THAN_CUT = 1.5
"""Kinds of layers whose counts differ by less than this factor form one group each."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The common properties of layers that may share a block table.

    `window` is None for full attention. `heads` is the number and the size of key heads, or None if
    all kinds have the same heads. `block_scale` is described in LayerGroup. Only recurrent layers
    have a `mamba_cache_mode`, vLLM's name for which states are kept.
    """

    window: int | None = None
    heads: tuple[int, int] | None = None
    block_scale: int = 1
    mamba_cache_mode: MambaCacheMode | None = None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table. `layers` has their indexes in ascending order, and `window`
    is None for full attention.

    Only a group of recurrent layers has a `mamba_cache_mode`. Recurrent layers are numbered
    separately from attention layers. `block_scale` is the number of tokens in the group's blocks,
    divided by the number in the smallest attention blocks.
    """

    window: int | None
    layers: tuple[int, ...]
    mamba_cache_mode: MambaCacheMode | None = None
    block_scale: int = 1

    @property
    def holds_states(self) -> bool:
        return self.mamba_cache_mode is not None

    def kv_cache_group(self, block_size: int, max_model_len: int) -> KVCacheGroup:
        """Returns the group as the scheduler and the pool need it, without indexes of layers.
        `block_size` is the number of tokens in the smallest blocks.

        If each step overwrites the recurrent state in place, a sequence has one block, which covers
        `max_model_len` tokens.
        """
        count = len(self.layers)
        if self.mamba_cache_mode is not None:
            overwritten = self.mamba_cache_mode is MambaCacheMode.NONE
            size = max_model_len if overwritten else block_size
            mode = self.mamba_cache_mode
            return KVCacheGroup(
                AttentionType.STATE_SPACE, size, num_layers=count, mamba_cache_mode=mode
            )
        kind = AttentionType.FULL if self.window is None else AttentionType.SLIDING_WINDOW
        return KVCacheGroup(kind, self.block_scale * block_size, self.window or 0, count)


def layer_kinds(
    layers: Sequence[AttentionLayer],
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO,
    *,
    scales_blocks: bool = True,
) -> list[LayerKind]:
    """Returns the kind of each attention layer.

    Layers with different windows and key shapes become separate kinds under two conditions:
    `scales_blocks` allows blocks with different numbers of tokens, and the size of a token's
    largest keys is a multiple of the size of all other layers' keys. Otherwise all layers are of
    one kind without a window, whose group keeps the blocks of all tokens. If all layers have the
    same window, or all keys have the same shape, shapes are ignored.
    """
    shapes = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
    if len(set(shapes)) == 1 or len({layer.window for layer in layers}) == 1:
        return [LayerKind(layer.window) for layer in layers]
    sizes = [layer.num_kv_heads * head_elements(layer, kv_cache_dtype) for layer in layers]
    largest = max(sizes)
    if not scales_blocks or any(largest % size for size in sizes):
        return [LayerKind() for _ in layers]
    return [
        LayerKind(layer.window, shape, largest // size)
        for layer, shape, size in zip(layers, shapes, sizes, strict=True)
    ]


def group_layers(
    layers: Sequence[LayerKind],
    num_state_layers: int = 0,
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.ALIGN,
) -> tuple[LayerGroup, ...]:
    """Divides layers of these kinds into groups, ordered by each kind's first layer. Groups of
    recurrent layers are last.

    If a kind has several groups, its layers are assigned to them round-robin, as in vLLM.
    """
    kinds: dict[LayerKind, list[int]] = {}
    for layer, kind in enumerate(layers):
        kinds.setdefault(kind, []).append(layer)
    if num_state_layers:
        kinds[LayerKind(mamba_cache_mode=mamba_cache_mode)] = list(range(num_state_layers))
    counts = [len(own) for own in kinds.values()]
    size = min(counts)
    if max(counts) < size * _PADDED_RATHER_THAN_CUT:
        size = max(counts)
    return tuple(
        LayerGroup(
            kind.window, tuple(own[first::num_groups]), kind.mamba_cache_mode, kind.block_scale
        )
        for kind, own in kinds.items()
        for num_groups in [-(-len(own) // size)]
        for first in range(num_groups)
    )


def block_scales(groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """The `block_scale` of each group of attention layers, or an empty tuple if all are 1."""
    scales = tuple(group.block_scale for group in groups if not group.holds_states)
    return scales if max(scales, default=1) > 1 else ()


def state_block_sizes(
    groups: Sequence[LayerGroup], block_size: int, max_model_len: int
) -> tuple[int, ...]:
    """For each group of recurrent layers, the number of tokens that one block covers."""
    return tuple(
        group.kv_cache_group(block_size, max_model_len).block_size
        for group in groups
        if group.holds_states
    )
