"""KV-cache groups: which layers share a block table, and which share memory.

Layers with the same window form a group, since their keys leave the window together: the pool takes
back the blocks before a window. All groups get blocks from one pool, so a block must be of the same
size in each of them. Therefore groups have as many layers as the rarest kind of layer, and other
kinds make several groups. A block has one page for each layer of the group that holds it, and the
i-th layers of all groups share their pages. The rule is that of vLLM's hybrid KV-cache manager.

The cost: a group with fewer layers leaves pages of its blocks unused. 52 layers with a window and
10 without, as in Gemma 3 27B, make groups of 10: one without windows, and six with windows, which
have 8 or 9 layers each, so that 8 of 70 pages are unused. In return a sequence of n tokens holds
blocks for n tokens in one group only, and at most a window's blocks in each of the other six.

Recurrent layers are one more kind. Their blocks hold a state of each layer.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from services.common.kv_cache_groups import AttentionType, KVCacheGroup, MambaCacheMode
from services.worker.backends.attention import AttentionLayer

_PADDED_RATHER_THAN_CUT = 1.5
"""Kinds of layers whose numbers differ by less than this factor each make one group."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table, in order. `window` None: they see everything before them.

    A group of recurrent layers has a `mamba_cache_mode`, and counts them apart from those that
    attend.
    """

    window: int | None
    layers: tuple[int, ...]
    mamba_cache_mode: MambaCacheMode | None = None

    @property
    def holds_states(self) -> bool:
        """Whether its layers are recurrent."""
        return self.mamba_cache_mode is not None

    def kv_cache_group(self, block_size: int, max_model_len: int) -> KVCacheGroup:
        """The group as scheduler and pool know it, without the indices of its layers.

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
        return KVCacheGroup(kind, block_size, self.window or 0, count)


def grouping_windows(layers: Sequence[AttentionLayer]) -> list[int | None]:
    """The windows by which layers are grouped. Where keys differ in shape between layers, these
    cannot share pages: they are one group, which holds blocks for all tokens, as if there were no
    windows.
    """
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    return [layer.window if len(shapes) == 1 else None for layer in layers]


def group_layers(
    windows: Sequence[int | None],
    num_state_layers: int = 0,
    mamba_cache_mode: MambaCacheMode = MambaCacheMode.ALIGN,
) -> tuple[LayerGroup, ...]:
    """The groups of layers with these windows, kinds in the order of their first layer; then those
    of recurrent layers.

    The layers of a kind are dealt out to its groups in turn, as vLLM does.
    """
    kinds: dict[Hashable, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if num_state_layers:
        kinds[mamba_cache_mode] = list(range(num_state_layers))
    counts = [len(layers) for layers in kinds.values()]
    size = min(counts)
    if max(counts) < size * _PADDED_RATHER_THAN_CUT:
        size = max(counts)
    return tuple(
        _group(kind, tuple(layers[first::num_groups]))
        for kind, layers in kinds.items()
        for num_groups in [-(-len(layers) // size)]
        for first in range(num_groups)
    )


def state_block_sizes(
    groups: Sequence[LayerGroup], block_size: int, max_model_len: int
) -> tuple[int, ...]:
    """Tokens that a block of each group of recurrent layers stands for."""
    return tuple(
        group.kv_cache_group(block_size, max_model_len).block_size
        for group in groups
        if group.holds_states
    )


def _group(kind: object, layers: tuple[int, ...]) -> LayerGroup:
    if isinstance(kind, MambaCacheMode):
        return LayerGroup(None, layers, kind)
    assert kind is None or isinstance(kind, int)
    return LayerGroup(kind, layers)
