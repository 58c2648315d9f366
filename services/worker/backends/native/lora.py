"""LoRA adapters in the compiled library's format (cpp/lora.h). A and B are packed into panels:
blocks of columns (cpp/panel.h).
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F  # noqa: N812

from services.worker.backends.lora import (
    PARTS,
    Factors,
    LayerDeltas,
    LoraLayer,
    LoraRows,
    LoraShape,
    stacked,
)
from services.worker.backends.native import library
from services.worker.backends.native.large_pages import LargePages

_LANES = 16
"""Columns in a vector: LANES in cpp/vector.h."""
_LEAST_IN_LARGE_PAGES = 8 * 2**20
"""An adapter of at least this many bytes is stored in large pages of 2 MiB. The unused part of its
last page is then relatively small.
"""
_SHIFT_BYTES = 5120
_shifts = cycle(range(0, 16 * _SHIFT_BYTES, _SHIFT_BYTES))
"""Yields, for each adapter in large pages, the number of bytes before it in its first page. If
equally structured adapters all began at the same offset, they would compete for the same few cache
sets.
"""

_begins: WeakValueDictionary[bytes, torch.Tensor] = WeakValueDictionary()
"""Tensors `begins` (see _PackedPart) by their bytes, so that adapters with equal ones share a
tensor. If each adapter had its own, a step would wait for memory every few panels.
"""


@dataclass(frozen=True, slots=True)
class _PackedPart:
    """A and B of a projection in panels. `begins` has, for each vector of output columns, the
    number of the first row of A that it uses, or -1 (see LoraProjection in cpp/lora.h).
    """

    a: torch.Tensor
    b: torch.Tensor
    begins: torch.Tensor
    width: int
    rank: int

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.begins.nbytes

    def moved(self, memory: LargePages) -> "_PackedPart":
        return replace(self, a=memory.copy(self.a), b=memory.copy(self.b))

    def structure(self) -> library.LoraProjection:
        addresses = (tensor.data_ptr() for tensor in (self.a, self.b, self.begins))
        return library.LoraProjection(*addresses, self.width, self.rank)


class NativeLora:
    """A PackedLora in C++. `shapes` maps names to the shapes of projections. `panel_width` is the
    number of columns in the library's panels.

    Panels are stored in the order in which a step reads them, in large pages if the adapter is
    large.
    """

    def __init__(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], panel_width: int
    ) -> None:
        packed = {
            (index, number): _packed(factors, shapes[part], panel_width)
            for index, layer in enumerate(layers)
            for number, part in enumerate(PARTS)
            if (factors := getattr(layer, part))
        }
        self.num_bytes = sum(part.num_bytes for part in packed.values())
        if self.num_bytes >= _LEAST_IN_LARGE_PAGES:
            memory = LargePages()
            memory.take((next(_shifts),), torch.uint8)
            packed = {place: part.moved(memory) for place, part in packed.items()}
        self._owned = packed
        """Keeps alive the memory to which the structures point."""
        self.layers = (library.NativeLoraLayer * len(layers))()
        for (index, number), part in packed.items():
            self.layers[index].parts[number] = part.structure()
        self.width = max((part.width for part in packed.values()), default=_LANES)


def _packed(factors: Factors, shape: LoraShape, panel_width: int) -> _PackedPart:
    pairs = library.PAIRS[factors[0].a.dtype]
    if not shape.is_gated and not _at_vectors(factors, shape.columns):
        factors = (stacked(factors, shape.columns),)
    rank = max(len(one.a) for one in factors)
    rank += -rank % pairs
    a = torch.cat([F.pad(one.a, (0, 0, 0, rank - len(one.a))) for one in factors])
    a = F.pad(a, (0, -a.shape[1] % pairs, 0, -len(a) % _LANES))
    columns = _columns_of_panels(shape, panel_width)
    b = torch.zeros(shape.columns + 1, rank, dtype=a.dtype)
    begins = torch.full((shape.columns + 1,), -1, dtype=torch.int32)
    for number, one in enumerate(factors):
        taken = slice(one.first, one.first + len(one.b))
        b[taken, : one.b.shape[1]] = one.b
        begins[taken] = number * rank
    of_vectors = begins[columns].view(-1, _LANES)[:, 0].contiguous()
    of_vectors = _begins.setdefault(of_vectors.numpy().tobytes(), of_vectors)
    panels_of_a, panels_of_b = _panels(a, _LANES, pairs), _panels(b[columns], panel_width, pairs)
    return _PackedPart(panels_of_a, panels_of_b, of_vectors, len(a), rank)


def _at_vectors(factors: Factors, columns: int) -> bool:
    """Whether each vector of columns is in a single factor or in none."""
    ends = {one.first + len(one.b) for one in factors} - {columns}
    return not any(edge % _LANES for edge in ends | {one.first for one in factors})


def _columns_of_panels(shape: LoraShape, panel_width: int) -> torch.Tensor:
    """Returns the projection's column at each position of its panels, as source_row in
    cpp/projection.h computes it, or `shape.columns` at padding positions.
    """
    if not shape.is_gated:
        places = torch.arange(-(-shape.columns // panel_width) * panel_width)
        return places.clamp(max=shape.columns)
    half = shape.columns // 2
    index = torch.arange(-(-half // _LANES) * _LANES)
    missing = index >= half
    both = (each.masked_fill(missing, 2 * half) for each in (index, half + index))
    return torch.stack([each.view(-1, _LANES) for each in both], dim=1).flatten()


def _panels(weight: torch.Tensor, width: int, pairs: int) -> torch.Tensor:
    columns, depth = weight.shape
    view = weight.view(columns // width, width, depth // pairs, pairs)
    return view.transpose(1, 2).contiguous()


class NativeLoraStep:
    def __init__(self, rows: LoraRows) -> None:
        adapters = [one for one in rows.adapters if isinstance(one, NativeLora)]
        assert len(adapters) == len(rows.adapters)
        layers = (ctypes.c_void_p * len(adapters))(
            *(ctypes.addressof(adapter.layers) for adapter in adapters)
        )
        self._owned = adapters, rows, layers
        """Keeps alive the memory to which the structure points."""
        self.structure = library.StepLora(
            *(ctypes.addressof(layers), rows.rows.ctypes.data, rows.starts.ctypes.data),
            *(max(adapter.width for adapter in adapters), len(adapters)),
        )

    def layer(self, index: int) -> LayerDeltas:
        address = ctypes.addressof(self.structure)
        parts = (library.LoraDelta(address, index, part) for part in range(len(PARTS)))
        return LayerDeltas(*(NativeDelta(self, delta) for delta in parts))


@dataclass(frozen=True, slots=True)
class NativeDelta:
    """A Delta that the library adds when it computes the projection."""

    step: NativeLoraStep
    structure: library.LoraDelta

    def added_to(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Never called, because the library adds the delta itself."""
        raise AssertionError("the library adds it to its own products")
