"""Reads the weights of projections, as stored, or quantized while they are loaded."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.worker.backends.quantized import QuantizedWeight, Weight, quantize_int8, stacked
from services.worker.models.errors import ModelTensorError, UnsupportedModel
from services.worker.models.files.checkpoint import WHOLE, Checkpoint, Index, TensorReader
from services.worker.models.files.gguf import BLOCK_TYPES
from services.worker.models.files.tensor_shapes import HEAD
from services.worker.models.quantization_config import (
    QuantizationConfig,
    QuantizationSetting,
    StoredFormat,
)
from services.worker.models.quantized_tensors import CODES, decoded, tensor_shapes

Shapes = dict[str, tuple[int, ...]]
_WEIGHT, _BIAS = ".weight", ".bias"


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The quantized weights of a checkpoint. `shapes` maps the name that a weight would have in an
    unquantized checkpoint to its shape. `config` is None if no weight is quantized, or if each
    quantized weight is one tensor of blocks (GGUF). `zero_biases` are biases that the architecture
    lacks. AutoGPTQ adds them to all quantized projections, and they must be zero.
    """

    checkpoint: Checkpoint
    config: QuantizationConfig | None
    shapes: Mapping[str, tuple[int, int]]
    zero_biases: frozenset[str] = frozenset()

    def check(self, expected: Shapes) -> None:
        """Raises ModelTensorError unless the checkpoint has exactly the tensors of `expected`.
        Where a weight is quantized, its quantized tensors are expected in place of the unquantized
        tensor.
        """
        stored: Shapes = {
            bias: self.shapes[bias.removesuffix(_BIAS) + _WEIGHT][:1] for bias in self.zero_biases
        }
        for name, shape in expected.items():
            stored |= self._tensors_of(name) if name in self.shapes else {name: shape}
        added = stored.keys() - expected.keys() | self.shapes.keys()
        self.checkpoint.check(stored, dict.fromkeys(added, CODES))

    def read(self, reader: TensorReader, name: str, dtype: torch.dtype) -> QuantizedWeight:
        """Reads one whole quantized weight."""
        if self.config is None:
            return reader.read_quantized(name, dtype)
        bias = name.removesuffix(_WEIGHT) + _BIAS
        if bias in self.zero_biases and reader.read_part(bias, ()).any():
            raise ModelTensorError(
                self.checkpoint.source,
                f"tensor {bias} is not part of this architecture, and it is not zero",
            )
        parts = self._tensors_of(name)
        tensors = {part.rpartition(".")[2]: reader.read_part(part, ()) for part in parts}
        try:
            return decoded(self.config, tensors, self.shapes[name], dtype)
        except ValueError as error:
            raise UnsupportedModel(self.checkpoint.source, f"{name}: {error}") from error

    def _tensors_of(self, name: str) -> Shapes:
        if self.config is None:
            return {name: self.shapes[name]}
        module = name.removesuffix(_WEIGHT)
        try:
            shapes = tensor_shapes(self.config, self.shapes[name])
        except ValueError as error:
            raise UnsupportedModel(self.checkpoint.source, f"{name}: {error}") from error
        return {f"{module}.{part}": shape for part, shape in shapes.items()}


def stored_weights(
    checkpoint: Checkpoint, config: QuantizationConfig | None, expected: Shapes, tied: str | None
) -> StoredWeights:
    """Finds the expected tensors that are quantized: those that `config` describes or, if it is
    None, those whose data types are quantized. `tied` is the name of a head that shares the
    embedding's weight, or None.
    """

    def is_quantized(name: str) -> bool:
        if config is not None:
            return config.quantizes(name.removesuffix(_WEIGHT))
        return name in checkpoint.tensors and checkpoint.tensors[name].dtype in BLOCK_TYPES

    shapes = {
        name: (shape[0], shape[1])
        for name, shape in expected.items()
        if name != tied and _is_projection(name, shape) and is_quantized(name)
    }
    zero_biases = frozenset[str]()
    if config is not None and config.format is StoredFormat.GPTQ:
        biases = {name.removesuffix(_WEIGHT) + _BIAS for name in shapes}
        zero_biases = frozenset(biases & checkpoint.tensors.keys() - expected.keys())
    return StoredWeights(checkpoint, config, shapes, zero_biases)


def _is_projection(name: str, shape: tuple[int, ...]) -> bool:
    is_matrix = len(shape) == 2 and name.endswith(_WEIGHT)
    return is_matrix and not name.endswith((".gate.weight", "embed_tokens.weight", "score.weight"))


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads weights of projections, for computations in `dtype`."""

    reader: TensorReader
    stored: StoredWeights
    dtype: torch.dtype
    setting: QuantizationSetting

    def read(self, *parts: tuple[str, Index]) -> Weight:
        """Reads parts of weights and stacks them along their rows, like TensorReader.read_parts.
        Raises UnsupportedModel if the parts are quantized differently, or if a part does not
        consist of whole groups.
        """
        is_plain = self.setting is QuantizationSetting.AUTO
        if is_plain and not any(name in self.stored.shapes for name, _ in parts):
            return self.reader.read_parts(*parts, dtype=self.dtype)
        try:
            return stacked([self._part(name, index) for name, index in parts])
        except ValueError as error:
            names = ", ".join(name for name, _ in parts)
            raise UnsupportedModel(self.stored.checkpoint.source, f"{names}: {error}") from error

    def made_head(self, weight: torch.Tensor) -> Weight:
        """Returns `weight` as the weight of a head, quantized if the setting requires it."""
        return weight if self.setting is QuantizationSetting.AUTO else quantize_int8(weight)

    def _part(self, name: str, index: Index) -> Weight:
        """Reads a part of a weight. If the setting requires quantization, whole rows are quantized
        before columns are selected, so that all ranks have the same codes.
        """
        if name in self.stored.shapes:
            weight = self.stored.read(self.reader, name, self.dtype)
            return _taken(weight, index)
        if self.setting is QuantizationSetting.AUTO:
            return self.reader.read_parts((name, index), dtype=self.dtype)
        num_axes = self.reader.dimensions(name)
        rows = self.reader.read_parts((name, index[: num_axes - 1]), dtype=self.dtype)
        has_int8_inputs = self.setting is QuantizationSetting.W8A8 and name != HEAD
        quantized = quantize_int8(rows, quantizes_inputs=has_int8_inputs)
        return _taken(quantized, (WHOLE, *index[num_axes - 1 :]))


def _taken(weight: QuantizedWeight, index: Index) -> QuantizedWeight:
    rows, columns = (*index, WHOLE, WHOLE)[:2]
    assert isinstance(rows, slice)
    assert isinstance(columns, slice)
    return weight.rows(rows).columns(columns)
