"""The compiled library's functions and structures, as cpp/exports.cpp and the headers declare them.

Tensors are passed as addresses, and the caller keeps their memory. The interpreter's lock is
released during a call.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, get_type_hints

import torch

from services.worker.backends.kernels import Activation, GatedMlp, LayerWeights, Linear, Mlp

EPILOGUES = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2}
"""The number of a projection's epilogue, by its activation."""

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_Fields = list[tuple[str, type[Any]]]


class Projection(ctypes.Structure):
    """A packed weight, its bias or None, and its epilogue."""

    _fields_: ClassVar[_Fields] = [
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("epilogue", ctypes.c_int),
    ]


class AttentionLayer(ctypes.Structure):
    """See AttentionLayer of the interface; 0 for no window, no softcap."""

    _fields_: ClassVar[_Fields] = [
        ("num_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int),
        ("softcap", ctypes.c_float),
    ]


class Layout(ctypes.Structure):
    """See StepLayout."""

    _fields_: ClassVar[_Fields] = [
        ("num_requests", ctypes.c_int),
        ("query_starts", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
    ]


class Heads(ctypes.Structure):
    """Queries, keys and values of a step's tokens, and their rotation; `half` 0 for none."""

    _fields_: ClassVar[_Fields] = [
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("half", ctypes.c_int),
    ]


class Pages(ctypes.Structure):
    """One layer's part of the cache."""

    _fields_: ClassVar[_Fields] = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("block_size", ctypes.c_int),
    ]


def fields_of(weights: type) -> _Fields:
    """The structure's fields for a dataclass of weights: addresses of tensors, Projections of
    Linears, and the fields of GatedMlp in place of an Mlp.
    """
    found: _Fields = []
    for name, kind in get_type_hints(weights).items():
        if kind is Mlp:
            found += fields_of(GatedMlp)
        elif kind is Linear:
            found.append((name, Projection))
        elif kind in (torch.Tensor, torch.Tensor | None):
            found.append((name, ctypes.c_void_p))
        else:
            raise TypeError(f"{weights.__name__}.{name}: no field of a structure holds {kind}")
    return found


def set_weights(target: ctypes.Structure, weights: LayerWeights | GatedMlp) -> None:
    """Fills the fields that `fields_of` makes of the dataclass, whose Linears are NativeLinears."""
    for field in fields(weights):
        value: Any = getattr(weights, field.name)
        if isinstance(value, GatedMlp):
            set_weights(target, value)
        elif value is None or isinstance(value, torch.Tensor):
            setattr(target, field.name, None if value is None else value.data_ptr())
        else:
            setattr(target, field.name, value.projection)


class NativeLayerWeights(ctypes.Structure):
    """See LayerWeights; None for norms that the layer does not have."""

    _fields_: ClassVar[_Fields] = fields_of(LayerWeights)


class DecoderLayer(NativeLayerWeights):
    """A layer's weights, how it attends, its pages, and the indexes of its layout and rotation."""

    _fields_: ClassVar[_Fields] = [
        ("attention", AttentionLayer),
        ("pages", Pages),
        ("group", ctypes.c_int),
        ("rotation", ctypes.c_int),
    ]


class Rotation(ctypes.Structure):
    """The addresses of the cos and sin of all positions."""

    _fields_: ClassVar[_Fields] = [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p)]


class Decoder(ctypes.Structure):
    """Embedding, all layers, the norm after them, and the projection to the vocabulary. `half`:
    pairs of a head that are rotated.
    """

    _fields_: ClassVar[_Fields] = [
        ("embedding", ctypes.c_void_p),
        ("embedding_scale", ctypes.c_float),
        ("rotations", ctypes.POINTER(Rotation)),
        ("num_rotations", ctypes.c_int),
        ("half", ctypes.c_int),
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("num_layers", ctypes.c_int),
        ("norm", ctypes.c_void_p),
        ("head", Projection),
        ("hidden_size", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
    ]


_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_int64


class Functions:
    """The library's functions for one data type."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        self.panel_width: int = library.panel_width()

        def function(
            name: str, *argument_types: type[Any], returns: type[Any] | None = None
        ) -> Any:
            found = library[f"{name}_{suffix}"]
            found.argtypes = argument_types
            found.restype = returns
            return found

        self.pack_weight = function("pack_weight", _ADDRESS, _ADDRESS, _COUNT, _COUNT, ctypes.c_int)
        self.project = function("project", ctypes.POINTER(Projection), _ADDRESS, _ADDRESS, _COUNT)
        self.project_full = function(
            "project_full", ctypes.POINTER(Projection), _ADDRESS, _ADDRESS, _COUNT
        )
        self.rms_norm = function(
            "rms_norm",
            *(_ADDRESS, _COUNT, _COUNT, _ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _COUNT),
            ctypes.c_float,
        )
        self.attend = function(
            "attend",
            ctypes.POINTER(AttentionLayer),
            ctypes.POINTER(Layout),
            ctypes.POINTER(Heads),
            ctypes.POINTER(Pages),
            _ADDRESS,
        )
        self.decoder_scratch = function(
            "decoder_scratch", ctypes.POINTER(Decoder), _COUNT, ctypes.c_int, returns=_COUNT
        )
        self.run_decoder = function(
            "run_decoder",
            *(ctypes.POINTER(Decoder), ctypes.POINTER(Layout)),
            *(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS),
        )


STRUCTURES: Mapping[str, type[ctypes.Structure]] = {
    "Projection": Projection,
    "AttentionLayer": AttentionLayer,
    "Layout": Layout,
    "Heads": Heads,
    "Pages": Pages,
    "LayerWeights": NativeLayerWeights,
    "DecoderLayer": DecoderLayer,
    "Rotation": Rotation,
    "Decoder": Decoder,
}
"""By their names in C++."""


def check_structures(
    library: ctypes.CDLL, structures: Mapping[str, type[ctypes.Structure]] = STRUCTURES
) -> None:
    """Raises TypeError if a structure has another size in C++ than here."""
    library.structure_size.restype = _COUNT
    for name, structure in structures.items():
        compiled, declared = library.structure_size(name.encode()), ctypes.sizeof(structure)
        if compiled != declared:
            raise TypeError(f"{name} has {declared} bytes in Python and {compiled} in C++")


def functions_by_dtype(library: ctypes.CDLL) -> dict[torch.dtype, Functions]:
    """The functions for each data type that the processor computes in. Raises TypeError if the
    library's structures are not those declared here.
    """
    check_structures(library)
    return {
        dtype: Functions(library, suffix)
        for dtype, suffix in _SUFFIXES.items()
        if hasattr(library, f"project_{suffix}")
    }
