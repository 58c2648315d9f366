"""Structures that Python and C++ both declare have the same layout."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.backends.kernels import LayerWeights
from services.worker.backends.native.compiled import default_cache_directory, load_compiled
from services.worker.backends.native.library import (
    STRUCTURES,
    NativeLayerWeights,
    address,
    check_structures,
    fields_of,
)


@dataclass(frozen=True, slots=True)
class OneMoreNorm(LayerWeights):
    value_norm: torch.Tensor | None


@pytest.fixture
def library(native: object) -> ctypes.CDLL:  # noqa: ARG001
    return load_compiled(default_cache_directory(), lambda: None)


def test_python_and_cpp_declare_the_same_sizes(library: ctypes.CDLL) -> None:
    check_structures(library)


def test_a_weight_that_only_python_declares_is_found(library: ctypes.CDLL) -> None:
    class Longer(ctypes.Structure):
        _fields_ = fields_of(OneMoreNorm)

    with pytest.raises(TypeError, match=r"^LayerWeights has \d+ bytes in Python and \d+ in C\+\+$"):
        check_structures(library, {**STRUCTURES, "LayerWeights": Longer})


def test_a_structure_that_the_library_does_not_have_is_found(library: ctypes.CDLL) -> None:
    with pytest.raises(TypeError, match=r"^Unknown has 272 bytes in Python and 0 in C\+\+$"):
        check_structures(library, {"Unknown": NativeLayerWeights})


def test_the_fields_are_those_of_the_weights_with_the_mlp_in_place() -> None:
    names = [name for name, _ in fields_of(LayerWeights)]
    assert names[:2] == ["input_norm", "qkv"]
    assert names[-3:] == ["gate_up", "down", "mlp_output_norm"]


def test_a_weight_of_another_kind_is_refused() -> None:
    @dataclass
    class Odd:
        path: Path

    with pytest.raises(TypeError, match=r"^Odd.path: no field of a structure holds"):
        fields_of(Odd)


@pytest.mark.parametrize("kind", ["writable", "read-only", "strided", "empty", "two dimensions"])
def test_an_array_is_passed_as_the_address_of_its_first_element(kind: str) -> None:
    numbers = np.arange(12, dtype=np.int32)
    array = {
        "writable": numbers[3:],
        "read-only": np.frombuffer(bytes(12), np.int32),
        "strided": numbers[1::2],
        "empty": numbers[:0],
        "two dimensions": numbers.reshape(3, 4)[1:],
    }[kind]
    assert address(array) == array.__array_interface__["data"][0]
