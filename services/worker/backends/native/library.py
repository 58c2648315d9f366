"""The compiled library's functions and structures, as declared in cpp/exports.h and the headers.

Tensors are passed as addresses, and the caller keeps their memory alive. The interpreter's lock is
released during a call, except in some functions for suffix trees.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import torch

from services.worker.backends.choices import Activation, KVCacheDtype
from services.worker.backends.kernels import GatedMlp, LayerWeights, Linear, Mlp
from services.worker.backends.lora import PARTS

EPILOGUES = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2}
"""Maps the activation of a projection to the number of its Epilogue in cpp/projection.h."""
PLAIN, W8A8 = 0, 4
FORMATS = {(torch.int8, 8): 1, (torch.int8, 4): 2, (torch.float8_e4m3fn, 8): 3}
"""Numbers of WeightFormat in cpp/quantized.h, by data type and bits of the codes. PLAIN is for
unquantized weights, and W8A8 for weights whose inputs are quantized too.
"""
PAIRS = {torch.bfloat16: 2, torch.float32: 1}
"""Maps each data type to the number of successive elements of a column that a panel stores side by
side (DEPTH in cpp/panel.h).
"""
CACHE_FORMATS = {KVCacheDtype.AUTO: 0, KVCacheDtype.INT8_PER_TOKEN_HEAD: 1}
"""The numbers of CacheFormat in cpp/heads.h."""

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ADDRESS, _COUNT, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_DOUBLE = ctypes.c_double
_Fields = list[tuple[str, type[Any]]]


def address(array: np.ndarray) -> int:
    """Returns the address of the array's elements. Of a writable, contiguous array it is read
    through a buffer, because `array.ctypes` takes several times as long, and a step passes ten
    arrays.
    """
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):
        return array.ctypes.data


def _fields(kinds: Mapping[str, type[Any]]) -> _Fields:
    return [(name, kind) for names, kind in kinds.items() for name in names.split()]


class Projection(ctypes.Structure):
    """A packed weight, its bias or None, its epilogue, and its quantization."""

    _fields_ = _fields(
        {
            "packed bias": _ADDRESS,
            "columns depth": _COUNT,
            "epilogue format has_offsets": _INT,
            "group": _COUNT,
        }
    )


class NativeQuantizedWeight(ctypes.Structure):
    """A QuantizedWeight of backends/quantized.py. `offsets` may be None."""

    _fields_ = _fields({"codes scales offsets": _ADDRESS})


class AttentionLayer(ctypes.Structure):
    """The AttentionLayer of backends/attention.py. A `window` or `softcap` of 0 means none."""

    _fields_ = _fields(
        {
            "num_heads num_kv_heads head_dim": _INT,
            "scale": _FLOAT,
            "window": _INT,
            "softcap": _FLOAT,
        }
    )


class Layout(ctypes.Structure):
    _fields_ = _fields(
        {"num_requests": _INT, "query_starts seq_lens rows tables": _ADDRESS, "table_width": _COUNT}
    )


class Heads(ctypes.Structure):
    """Queries, keys and values of a step's tokens, and their rotation (`half` is 0 for none)."""

    _fields_ = _fields(
        {
            "query key value": _ADDRESS,
            "query_stride key_stride value_stride": _COUNT,
            "cos sin": _ADDRESS,
            "half": _INT,
        }
    )


class Pages(ctypes.Structure):
    """One layer's pages in the cache. The values of `format` are in CACHE_FORMATS."""

    _fields_ = _fields({"keys values": _ADDRESS, "block_size format": _INT})


def fields_of(weights: type) -> _Fields:
    """Returns the structure's fields for a dataclass of weights: addresses for tensors, Projections
    for Linears, and the fields of GatedMlp for an Mlp.
    """
    found: _Fields = []
    for name, kind in get_type_hints(weights).items():
        if kind is Mlp:
            found += fields_of(GatedMlp)
        elif kind is Linear:
            found.append((name, Projection))
        elif kind in (torch.Tensor, torch.Tensor | None):
            found.append((name, _ADDRESS))
        else:
            raise TypeError(f"{weights.__name__}.{name}: no field of a structure holds {kind}")
    return found


def set_weights(target: ctypes.Structure, weights: LayerWeights | GatedMlp) -> None:
    """Sets the fields that `fields_of` returns. All Linears must be NativeLinears."""
    for field in fields(weights):
        value: Any = getattr(weights, field.name)
        if isinstance(value, GatedMlp):
            set_weights(target, value)
        elif value is None or isinstance(value, torch.Tensor):
            setattr(target, field.name, None if value is None else value.data_ptr())
        else:
            setattr(target, field.name, value.projection)


class NativeLayerWeights(ctypes.Structure):
    """The LayerWeights of a layer. Norms that the layer lacks are None."""

    _fields_ = fields_of(LayerWeights)


class DecoderLayer(NativeLayerWeights):
    """A layer's weights, attention parameters and pages, and indexes of its group and rotation."""

    _fields_ = _fields({"attention": AttentionLayer, "pages": Pages, "group rotation": _INT})


class Rotation(ctypes.Structure):
    """The addresses of the cos and sin of all positions."""

    _fields_ = _fields({"cos sin": _ADDRESS})


class Decoder(ctypes.Structure):
    """Embedding, all layers, the final norm, and the projection to the vocabulary. `half` is the
    number of rotated pairs of elements in a head.
    """

    _fields_ = _fields(
        {
            "embedding": _ADDRESS,
            "embedding_scale": _FLOAT,
            "rotations": ctypes.POINTER(Rotation),
            "num_rotations half": _INT,
            "layers": ctypes.POINTER(DecoderLayer),
            "num_layers": _INT,
            "norm": _ADDRESS,
            "head": Projection,
            "hidden_size": _COUNT,
            "epsilon": _FLOAT,
            "ranks head_ranks": _ADDRESS,
        }
    )


class NativeSharedRanks(ctypes.Structure):
    """The structure SharedRanks of cpp/shared_ranks.h."""

    _fields_ = _fields(
        {
            "cells slots": _ADDRESS,
            "slot_bytes": _COUNT,
            "timeout_seconds": _DOUBLE,
            "rank size": _INT,
            "round": ctypes.c_uint32,
            "is_ended missing": _INT,
        }
    )


class LoraProjection(ctypes.Structure):
    """A and B of one adapter for one projection. `a` is None if the adapter adds nothing."""

    _fields_ = _fields({"a b begins": _ADDRESS, "width rank": _COUNT})


class NativeLoraLayer(ctypes.Structure):
    """An adapter's A and B for the projections of a layer."""

    _fields_ = _fields({"parts": LoraProjection * len(PARTS)})


class StepLora(ctypes.Structure):
    """The adapters of a step's rows (tokens)."""

    _fields_ = _fields({"adapters rows starts": _ADDRESS, "width": _COUNT, "num_adapters": _INT})


class LoraDelta(ctypes.Structure):
    """What the adapters of a step add to one projection. The library allocates `inside`."""

    _fields_ = _fields({"step": _ADDRESS, "layer part": _INT, "inside": _ADDRESS})


class NativeLogitRows(ctypes.Structure):
    """Some rows of a matrix of logits in float32. `rows` has their `count` indexes."""

    _fields_ = _fields(
        {"logits": _ADDRESS, "stride size": _COUNT, "rows": _ADDRESS, "count": _COUNT}
    )


class NativeRowMasks(ctypes.Structure):
    """The RowMasks of rows. `rows` is None if no row has a mask."""

    _fields_ = _fields({"words": _ADDRESS, "width": _COUNT, "rows": _ADDRESS})


class NativeRowParameters(ctypes.Structure):
    _fields_ = _fields({"values seeds positions": _ADDRESS})


class NativeSuffixSettings(ctypes.Structure):
    """The SuffixRules. `max_bytes` limits the memory of the trees of responses."""

    _fields_ = _fields(
        {"depth max_cached max_bytes": _COUNT, "max_spec_factor min_token_prob": _DOUBLE}
    )


class SamplingFunctions:
    """The library's functions for sampling. They do not depend on the model's data type."""

    def __init__(self, library: ctypes.CDLL) -> None:
        rows, masks = ctypes.POINTER(NativeLogitRows), ctypes.POINTER(NativeRowMasks)
        parameters = ctypes.POINTER(NativeRowParameters)
        self.num_row_values: int = library.num_row_values()
        self.sample_rows = library.sample_rows
        self.sample_rows.argtypes = (rows, masks, parameters, _ADDRESS)
        self.sample_rows.restype = None
        self.copy_rows = library.copy_rows
        self.copy_rows.argtypes, self.copy_rows.restype = (rows, masks, *2 * (_ADDRESS,)), None


class RankFunctions:
    """The library's functions for ranks that share memory. They do not depend on the data type."""

    def __init__(self, library: ctypes.CDLL) -> None:
        ranks = ctypes.POINTER(NativeSharedRanks)
        self.gather = library.gather_ranks
        self.gather.argtypes, self.gather.restype = (ranks, *2 * (_ADDRESS,), _COUNT), None
        self.end = library.end_ranks
        self.end.argtypes, self.end.restype = (ranks,), None


class SuffixFunctions:
    """The library's functions for suffix trees. They do not depend on the model's data type.

    Functions that take microseconds between two steps keep the interpreter's lock. Otherwise a
    waiting event loop would delay the next step.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(
            name: str, *arguments: type[Any], returns: type[Any] | None = None, holds: bool = False
        ) -> Any:
            prototype = ctypes.PYFUNCTYPE if holds else ctypes.CFUNCTYPE
            return prototype(returns, *arguments)((f"suffix_{name}", library))

        self.new = function("new", ctypes.POINTER(NativeSuffixSettings), returns=_ADDRESS)
        self.delete = function("delete", _ADDRESS)
        self.clear = function("clear", _ADDRESS)
        self.enter = function("enter", _ADDRESS, _INT, ctypes.c_char_p, *2 * (_COUNT,))
        batch = _ADDRESS, _ADDRESS, _COUNT, _ADDRESS
        self.take_in = function("take_in", *batch, ctypes.c_char_p, _COUNT, holds=True)
        self.read = function("read", *batch, _INT)
        wanted = _INT, _COUNT, _ADDRESS
        self.propose = function("propose", *batch, *wanted, returns=_COUNT, holds=True)
        self.leave = function("leave", _ADDRESS, _INT)
        self.num_cached = function("num_cached", _ADDRESS, returns=_COUNT)
        self.cached_bytes = function("cached_bytes", _ADDRESS, returns=_COUNT)


class Functions:
    """The library's functions for one data type. The names of the functions end with `suffix`."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        self.panel_width: int = library.panel_width()

        def function(name: str, *arguments: type[Any], returns: type[Any] | None = None) -> Any:
            address = ctypes.c_size_t.in_dll(library, f"{name}_{suffix}").value
            return ctypes.CFUNCTYPE(returns, *arguments)(address)

        projection, decoder = ctypes.POINTER(Projection), ctypes.POINTER(Decoder)
        layout, pages = ctypes.POINTER(Layout), ctypes.POINTER(Pages)
        quantized = ctypes.POINTER(NativeQuantizedWeight)
        self.panel_bytes = function("panel_bytes", projection, returns=_COUNT)
        self.pack_weight = function("pack_weight", projection, _ADDRESS)
        self.pack_quantized = function("pack_quantized", projection, quantized)
        arguments = projection, _ADDRESS, _ADDRESS, _COUNT, ctypes.POINTER(LoraDelta)
        self.project = function("project", *arguments)
        self.project_full = function("project_full", *arguments)
        self.rms_norm = function(
            *("rms_norm", _ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS, _ADDRESS),
            *(_COUNT, _COUNT, _FLOAT),
        )
        layer, heads = ctypes.POINTER(AttentionLayer), ctypes.POINTER(Heads)
        self.attend = function("attend", layer, layout, heads, pages, _ADDRESS)
        self.run_decoder = function(
            *("run_decoder", decoder, layout, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS),
            *(_COUNT, _ADDRESS, ctypes.POINTER(StepLora)),
        )


STRUCTURES: Mapping[str, type[ctypes.Structure]] = {
    "Projection": Projection,
    "QuantizedWeight": NativeQuantizedWeight,
    "AttentionLayer": AttentionLayer,
    "Layout": Layout,
    "Heads": Heads,
    "Pages": Pages,
    "LayerWeights": NativeLayerWeights,
    "DecoderLayer": DecoderLayer,
    "Rotation": Rotation,
    "Decoder": Decoder,
    "SharedRanks": NativeSharedRanks,
    "LoraProjection": LoraProjection,
    "LoraLayer": NativeLoraLayer,
    "StepLora": StepLora,
    "LoraDelta": LoraDelta,
    "LogitRows": NativeLogitRows,
    "RowMasks": NativeRowMasks,
    "RowParameters": NativeRowParameters,
    "SuffixSettings": NativeSuffixSettings,
}
"""Maps the names of structures in C++ to their declarations here."""


def check_structures(
    library: ctypes.CDLL, structures: Mapping[str, type[ctypes.Structure]] = STRUCTURES
) -> None:
    """Raises TypeError if a structure has another size in C++ than in Python."""
    library.structure_size.restype = _COUNT
    for name, structure in structures.items():
        compiled, declared = library.structure_size(name.encode()), ctypes.sizeof(structure)
        if compiled != declared:
            raise TypeError(f"{name} has {declared} bytes in Python and {compiled} in C++")


def functions_by_dtype(library: ctypes.CDLL) -> dict[torch.dtype, Functions]:
    """Returns each data type's functions. Raises TypeError as `check_structures` does."""
    check_structures(library)
    return {dtype: Functions(library, suffix) for dtype, suffix in _SUFFIXES.items()}
