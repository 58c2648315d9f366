"""How a worker reads the weights of projections: as they are stored, or quantized at load."""

import enum
from dataclasses import dataclass

import torch

from services.worker.backends.quantized import Weight, quantize_int8, stacked
from services.worker.models.checkpoint import WHOLE, Index, TensorReader


class QuantizationSetting(enum.Enum):
    """Bits of the weights of projections."""

    AUTO = "auto"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads weights of projections, for a computation in `dtype`."""

    reader: TensorReader
    dtype: torch.dtype
    setting: QuantizationSetting

    def read(self, *parts: tuple[str, Index]) -> Weight:
        """Parts of weights, stacked along their rows; see TensorReader.read_parts."""
        if self.setting is QuantizationSetting.AUTO:
            return self.reader.read_parts(*parts, dtype=self.dtype)
        return stacked([self._quantized(name, index) for name, index in parts])

    def made(self, weight: torch.Tensor) -> Weight:
        """A weight that was read already."""
        return weight if self.setting is QuantizationSetting.AUTO else quantize_int8(weight)

    def _quantized(self, name: str, index: Index) -> Weight:
        """Rows are quantized whole, so that every rank has the same codes whatever columns of them
        it takes.
        """
        taken = index[-1] if len(index) == self.reader.dimensions(name) else WHOLE
        rows = index if taken is WHOLE else index[:-1]
        whole = quantize_int8(self.reader.read_parts((name, rows), dtype=self.dtype))
        return whole.columns(taken) if isinstance(taken, slice) else whole
