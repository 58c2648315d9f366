"""Adapters as the compiled library takes them: see cpp/lora.h."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
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


class NativeLora:
    """See PackedLora. `shapes`: of each projection, by name. `panel_width`: that of the library."""

    def __init__(
        self, layers: Sequence[LoraLayer], shapes: Mapping[str, LoraShape], panel_width: int
    ) -> None:
        self._owned: list[torch.Tensor] = []
        """The memory that the structures point to."""
        self.layers = (NativeLoraLayer * len(layers))()
        self.width = _LANES
        for target, layer in zip(self.layers, layers, strict=True):
            for number, part in enumerate(PARTS):
                factors = getattr(layer, part)
                if factors:
                    target.parts[number] = self._packed(factors, shapes[part], panel_width)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._owned)

    def _packed(self, factors: Factors, shape: LoraShape, panel_width: int) -> LoraProjection:
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
        packed = _panels(a, _LANES, pairs), _panels(b[columns], panel_width, pairs)
        of_vectors = begins[columns].view(-1, _LANES)[:, 0].contiguous()
        self._owned += [*packed, of_vectors]
        self.width = max(self.width, len(a))
        addresses = (tensor.data_ptr() for tensor in (*packed, of_vectors))
        return LoraProjection(*addresses, len(a), rank)


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
        adapter_of = np.full(rows.num_rows, -1, np.int32)
        counts = np.diff(rows.starts)
        adapter_of[rows.rows] = np.repeat(np.arange(len(adapters), dtype=np.int32), counts)
        layers = (ctypes.c_void_p * len(adapters))(
            *(ctypes.addressof(adapter.layers) for adapter in adapters)
        )
        self._owned = adapters, rows, adapter_of, layers
        """The memory that the structure points to."""
        self.structure = StepLora(
            ctypes.addressof(layers),
            *(array.ctypes.data for array in (adapter_of, rows.rows, rows.starts)),
            *(rows.num_rows, max(adapter.width for adapter in adapters), len(adapters)),
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
