"""KV-cache groups: which layers share a block table, and which share memory.

Layers that see the past alike form a group, since their keys fall out of sight together: the pool
takes back what a window has left behind. All groups draw their blocks from one pool, so a block
must be as large in each of them. Hence groups of as many layers as the rarest kind of layer has,
more groups of the other kinds, and pages instead of layers: a block has one page for each layer of
the group that happens to own it, and the i-th layers of all groups lie in the same pages. The rule
is that of vLLM's hybrid KV-cache manager.

What it costs: a group that is not full leaves the rest of its blocks' pages unused. 52 layers with
a window and 10 without, as in Gemma 3 27B, make groups of 10: one full, six for the windows, with 8
or 9 layers each, and so 8 pages of 70 in vain. In return a sequence of n tokens holds n tokens'
blocks in one group only, and no more than a window's in the other six.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.kv_cache_groups import AttentionType, KVCacheGroup

_PADDED_RATHER_THAN_CUT = 1.5
"""Kinds of layers whose numbers differ by less than this factor each make one group."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table, in order. `window` None: they see everything before them."""

    window: int | None
    layers: tuple[int, ...]

    def kv_cache_group(self, block_size: int) -> KVCacheGroup:
        """The group as scheduler and pool know it, without the indices of its layers."""
        kind = AttentionType.FULL if self.window is None else AttentionType.SLIDING_WINDOW
        return KVCacheGroup(kind, block_size, self.window or 0, len(self.layers))


def group_layers(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """The groups of layers with these windows, kinds in the order of their first layer.

    The layers of a kind are dealt out to its groups in turn, as vLLM does.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = min(counts)
    if max(counts) < size * _PADDED_RATHER_THAN_CUT:
        size = max(counts)
    return tuple(
        LayerGroup(window, tuple(layers[first::num_groups]))
        for window, layers in kinds.items()
        for num_groups in [-(-len(layers) // size)]
        for first in range(num_groups)
    )
