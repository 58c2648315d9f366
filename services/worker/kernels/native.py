"""The compiled library's functions and structures, as cpp/kernels.h declares them.

Tensors are handed over as addresses: whoever calls keeps them alive. The interpreter's lock is free
during a call.
"""

import ctypes
from typing import Any, ClassVar

import torch

from services.worker.kernels.interface import Activation

EPILOGUES = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2}
"""What happens to a projection's columns, by their activation."""

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_Fields = list[tuple[str, type[Any]]]


class Projection(ctypes.Structure):
    """A packed weight with its bias, None for none, and its epilogue."""

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
        ("block_tables", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
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


_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_int64


class Functions:
    """The library's functions for one data type."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        self.panel_width: int = library.panel_width()

        def function(name: str, *argument_types: type[Any]) -> Any:
            found = library[f"{name}_{suffix}"]
            found.argtypes = argument_types
            found.restype = None
            return found

        self.pack_weight = function("pack_weight", _ADDRESS, _ADDRESS, _COUNT, _COUNT, ctypes.c_int)
        self.project = function("project", ctypes.POINTER(Projection), _ADDRESS, _ADDRESS, _COUNT)
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


def functions_by_dtype(library: ctypes.CDLL) -> dict[torch.dtype, Functions]:
    """The functions for each data type that the processor computes in."""
    return {
        dtype: Functions(library, suffix)
        for dtype, suffix in _SUFFIXES.items()
        if hasattr(library, f"project_{suffix}")
    }
