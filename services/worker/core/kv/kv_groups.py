"""KV-cache groups: which layers share a block table, and which share memory.

Layers with the same window form a group, since their keys leave the window together: the pool takes
back the blocks before a window. All groups get blocks from one pool, so a block must take the same
memory in each of them. Therefore groups have as many layers as the rarest kind of layer, and other
kinds make several groups. A block has one page for each layer of the group that holds it, and the
i-th layers of all groups share their pages. The rule is that of vLLM's hybrid KV-cache manager.

Where keys differ in shape between layers with different windows, as in Gemma 4, layers whose keys
take less memory hold more tokens in a block: twice as many if they take half of it.

The cost: a group with fewer layers leaves pages of its blocks unused. 52 layers with a window and
10 without, as in Gemma 3 27B, make groups of 10: one without windows, and six with windows, which
have 8 or 9 layers each, so that 8 of 70 pages are unused. In return a sequence of n tokens holds
blocks for n tokens in one group only, and at most a window's blocks in each of the other six.

Recurrent layers are one more kind. Their blocks hold a state of each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.pool.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.worker.backends.attention import AttentionLayer, head_elements
from services.worker.backends.choices import KVCacheDtype

_PADDED_RATHER_THAN_CUT = 1.5
"""Kinds of layers whose numbers differ by less than this factor each make one group."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers that may share a block table have in common. `window` None: they see everything
    before them. `heads`: number and size of the heads of keys, if that tells kinds apart.
    `block_scale`: see LayerGroup. Recurrent layers have a `mamba_cache_mode`.
    """

    window: int | None = None
    heads: tuple[int, int] | None = None
    block_scale: int = 1
    mamba_cache_mode: MambaCacheMode | None = None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table, in order. `window` None: they see everything before them.

    A group of recurrent layers has a `mamba_cache_mode`, and counts them apart from those that
    attend. `block_scale`: how many times as many tokens its blocks hold as the smallest blocks of
    layers that attend.
    """

    window: int | None
    layers: tuple[int, ...]
    mamba_cache_mode: MambaCacheMode | None = None
    block_scale: int = 1

    @property
    def holds_states(self) -> bool:
        """Whether its layers are recurrent."""
        return self.mamba_cache_mode is not None

    def kv_cache_group(self, block_size: int, max_model_len: int) -> KVCacheGroup:
        """The group as scheduler and pool know it, without the indices of its layers. `block_size`:
        tokens of the smallest blocks.

        A state that each step overwrites has a block that stands for the longest sequence.
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
    """The kind of each layer that attends.

    Layers with different windows whose keys differ in shape make groups if the memory of the
    largest keys of a token is a multiple of that of the others, and blocks may differ in tokens
    (`scales_blocks`). Otherwise all layers are of one kind, without a window: their group keeps the
    blocks of all tokens. One kind of window needs no second group, whatever the shapes are.
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
    """The groups of layers of these kinds, kinds in the order of their first layer; then those of
    recurrent layers.

    The layers of a kind are dealt out to its groups in turn, as vLLM does.
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
    """The `block_scale` of each group of layers that attend; empty if blocks have one size."""
    scales = tuple(group.block_scale for group in groups if not group.holds_states)
    return scales if max(scales, default=1) > 1 else ()


def state_block_sizes(
    groups: Sequence[LayerGroup], block_size: int, max_model_len: int
) -> tuple[int, ...]:
    """Tokens that a block of each group of recurrent layers stands for."""
    return tuple(
        group.kv_cache_group(block_size, max_model_len).block_size
        for group in groups
        if group.holds_states
    )
