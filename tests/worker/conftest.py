"""Fixtures of the native kernels, which are compiled once and reused in later test sessions."""

from dataclasses import dataclass

import pytest
import torch

from services.worker.backends.native.compiled import (
    NotCompiled,
    default_cache_directory,
    load_compiled,
)
from services.worker.backends.native.kernels import NativeKernels
from services.worker.backends.native.library import Functions, functions_by_dtype


@dataclass(frozen=True)
class Native:
    kernels: NativeKernels
    functions: Functions
    dtype: torch.dtype
    tolerance: float


@pytest.fixture(
    scope="session", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
def native(request: pytest.FixtureRequest) -> Native:
    """The native kernels for each data type. Skips the test if they cannot be built."""
    torch.set_num_threads(2)
    try:
        library = load_compiled(default_cache_directory(), lambda: None)
    except NotCompiled as reason:
        pytest.skip(f"no compiled kernels: {reason}")
    return Native(
        NativeKernels(library),
        functions_by_dtype(library)[request.param],
        request.param,
        1e-5 if request.param is torch.float32 else 1e-2,
    )
