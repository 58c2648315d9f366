"""Adapters as the compiled library takes them: see cpp/lora.h."""

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
from services.worker.backends.native.large_pages import LargePages
from services.worker.backends.native.library import (
    LoraDelta,
    LoraProjection,
    NativeLoraLayer,
    StepLora,
)

_LANES = 16
"""Columns of a vector: LANES of cpp/vector.h."""
_PAIRS = {torch.bfloat16: 2, torch.float32: 1}
"""Elements of a step of depth: DEPTH of cpp/panel.h."""
_LEAST_IN_LARGE_PAGES = 8 * 2**20
"""Of an adapter with so many bytes the last large page, of 2 MiB, is a small part."""
_SHIFT_BYTES = 5120
_shifts = cycle(range(0, 16 * _SHIFT_BYTES, _SHIFT_BYTES))
"""Where the next adapter begins in its first page. Adapters of the same layout that all began at
the same place would share the few sets of the caches that such addresses have.
"""

_begins: WeakValueDictionary[bytes, torch.Tensor] = WeakValueDictionary()
"""What `_PackedPart.begins` holds, by content. Most projections of a step have the same one: with a
copy of its own each adapter would wait for memory at every few panels.
"""


@dataclass(frozen=True, slots=True)
class _PackedPart:
    """A and B of a projection in panels, and where the vectors of its columns begin: see
    LoraProjection in cpp/lora.h.
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
        """A copy there."""
        return replace(self, a=memory.copy(self.a), b=memory.copy(self.b))

    def structure(self) -> LoraProjection:
        addresses = (tensor.data_ptr() for tensor in (self.a, self.b, self.begins))
        return LoraProjection(*addresses, self.width, self.rank)


class NativeLora:
    """See PackedLora. `shapes`: of each projection, by name. `panel_width`: that of the library.

    Panels lie in the order in which a step reads them, in large pages if the adapter is large.
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
        """The memory that the structures point to."""
        self.layers = (NativeLoraLayer * len(layers))()
        for (index, number), part in packed.items():
            self.layers[index].parts[number] = part.structure()
        self.width = max((part.width for part in packed.values()), default=_LANES)


def _packed(factors: Factors, shape: LoraShape, panel_width: int) -> _PackedPart:
    pairs = _PAIRS[factors[0].a.dtype]
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
    of_vectors = _shared(begins[columns].view(-1, _LANES)[:, 0].contiguous())
    panels_of_a, panels_of_b = _panels(a, _LANES, pairs), _panels(b[columns], panel_width, pairs)
    return _PackedPart(panels_of_a, panels_of_b, of_vectors, len(a), rank)


def _shared(begins: torch.Tensor) -> torch.Tensor:
    """An equal tensor of another adapter or layer, if one is in memory."""
    return _begins.setdefault(begins.numpy().tobytes(), begins)


def _at_vectors(factors: Factors, columns: int) -> bool:
    """Whether each vector of columns gets what one of the factors adds, or nothing."""
    ends = {one.first + len(one.b) for one in factors} - {columns}
    return not any(edge % _LANES for edge in ends | {one.first for one in factors})


def _columns_of_panels(shape: LoraShape, panel_width: int) -> torch.Tensor:
    """The column of the projection in each place of its panels, as source_row of cpp/linear.h has
    them; `shape.columns` for padding.
    """
    if not shape.is_gated:
        places = torch.arange(-(-shape.columns // panel_width) * panel_width)
        return places.clamp(max=shape.columns)
    half = shape.columns // 2
    index = torch.arange(-(-half // _LANES) * _LANES)
    missing = index >= half
    gates, values = (
        index.masked_fill(missing, 2 * half),
        (half + index).masked_fill(missing, 2 * half),
    )
    return torch.stack((gates.view(-1, _LANES), values.view(-1, _LANES)), dim=1).flatten()


def _panels(weight: torch.Tensor, width: int, pairs: int) -> torch.Tensor:
    """[columns, depth] -> panels of `width` columns: [panels, depth / pairs, width, pairs]."""
    columns, depth = weight.shape
    view = weight.view(columns // width, width, depth // pairs, pairs)
    return view.transpose(1, 2).contiguous()


class NativeLoraStep:
    """See LoraStep."""

    def __init__(self, rows: LoraRows) -> None:
        adapters = [one for one in rows.adapters if isinstance(one, NativeLora)]
        assert len(adapters) == len(rows.adapters)
        layers = (ctypes.c_void_p * len(adapters))(
            *(ctypes.addressof(adapter.layers) for adapter in adapters)
        )
        self._owned = adapters, rows, layers
        """The memory that the structure points to."""
        self.structure = StepLora(
            *(ctypes.addressof(layers), rows.rows.ctypes.data, rows.starts.ctypes.data),
            *(max(adapter.width for adapter in adapters), len(adapters)),
        )

    def layer(self, index: int) -> LayerDeltas:
        address = ctypes.addressof(self.structure)
        return LayerDeltas(
            *(NativeDelta(self, LoraDelta(address, index, part)) for part in range(len(PARTS)))
        )


@dataclass(frozen=True, slots=True)
class NativeDelta:
    """See Delta: it is added by the library, in the call of the projection."""

    step: NativeLoraStep
    structure: LoraDelta

    def added_to(
        self,
        product: torch.Tensor,  # noqa: ARG002
        x: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """Never called: the library's own projections take the structure."""
        raise AssertionError("the library adds it to its own products")
