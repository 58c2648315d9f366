"""Checks, before weights are read, whether the machine has everything that a worker on CUDA needs.

The error for a missing requirement is one sentence with a remedy. `load_xformers` finds problems
that appear only when xFormers is imported.
"""

import ctypes
import importlib.metadata
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.backends.attention import AttentionLayer, StateLayer
from services.worker.backends.device import UnsuitableDevice, dtype_name

logger = logging.getLogger(__name__)

XFORMERS = "0.0.35"
RUNTIME_LIBRARY = "libcudart.so.12"
BLOCK_SIZES = (16, 32, 64, 128, 256)
HEAD_DIMS = (16, 32, 64, 128, 256, 512)
_OLDEST_TRITON, _TOO_NEW_TRITON = (3, 6), (3, 9)
_LEAST_CAPABILITY = (8, 0)
_DTYPES = (torch.float16, torch.bfloat16)
_INSTALL = "pip install 'stepwell[gpu]'"


@dataclass(frozen=True, slots=True)
class CudaSetup:
    """What this machine has for CUDA: versions of packages. None and False mark what is missing."""

    device_name: str | None
    capability: tuple[int, int]
    compiler: str | None
    has_python_headers: bool
    triton: str | None
    xformers: str | None


def find_setup() -> CudaSetup:
    """Inspects this machine without importing packages."""
    name, capability = None, (0, 0)
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    headers = Path(sysconfig.get_paths(_scheme())["include"], "Python.h")
    return CudaSetup(
        device_name=name,
        capability=capability,
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        has_python_headers=headers.exists(),
        triton=_version("triton"),
        xformers=_version("xformers"),
    )


def check_setup(setup: CudaSetup) -> None:
    """Raises UnsuitableDevice for the first missing requirement."""
    if setup.device_name is None:
        raise UnsuitableDevice(
            "device is cuda, but torch finds no CUDA device; check the driver, and that torch was "
            "built for CUDA, or set --device cpu"
        )
    if setup.capability < _LEAST_CAPABILITY:
        raise UnsuitableDevice(
            f"{setup.device_name} has compute capability {_dotted(setup.capability)}, and "
            f"{_dotted(_LEAST_CAPABILITY)} is needed; use a newer GPU or set --device cpu"
        )
    if setup.xformers is None or setup.xformers.partition("+")[0] != XFORMERS:
        raise UnsuitableDevice(
            f"xFormers {XFORMERS} is needed, and {_found(setup.xformers)}; run {_INSTALL}"
        )
    if setup.triton is None or not _suits(setup.triton):
        raise UnsuitableDevice(
            f"Triton 3.6 to 3.8 is needed, and {_found(setup.triton)}; later ones cannot compile "
            "xFormers' paged kernel; run pip install 'triton>=3.6,<3.9'"
        )
    if setup.compiler is None:
        raise UnsuitableDevice(
            "Triton needs a C compiler to launch kernels, and there is none; install gcc or name "
            "one in CC"
        )
    if not setup.has_python_headers:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UnsuitableDevice(
            "Triton needs Python's headers to launch kernels, and Python.h is not there; install "
            f"them, on Debian with apt-get install python{version}-dev"
        )


def suits_xformers(layers: Sequence[AttentionLayer]) -> bool:
    """Whether xFormers' kernel supports these layers. It does not support softcap."""
    return all(layer.softcap is None for layer in layers)


def check_model(layers: tuple[AttentionLayer, ...], block_size: int, dtype: torch.dtype) -> None:
    """Raises UnsuitableDevice for a model that CUDA does not support. Head sizes are limited only
    if xFormers' kernel computes attention.
    """
    if dtype not in _DTYPES:
        raise UnsuitableDevice(
            f"dtype {dtype_name(dtype)} is not supported on CUDA; set --dtype bfloat16, or "
            "--device cpu"
        )
    if block_size not in BLOCK_SIZES:
        raise UnsuitableDevice(
            f"block_size is {block_size}, but on CUDA it must be {_listed(BLOCK_SIZES)}"
        )
    for layer in layers if suits_xformers(layers) else ():
        if layer.head_dim not in HEAD_DIMS:
            raise UnsuitableDevice(
                f"the model's attention heads have size {layer.head_dim}, but on CUDA only "
                f"{_listed(HEAD_DIMS)} are supported; set --device cpu"
            )


def check_states(states: tuple[StateLayer, ...]) -> None:
    """Raises UnsuitableDevice for a model with recurrent layers."""
    if states:
        raise UnsuitableDevice(
            "the model has recurrent layers, which are supported only on the CPU; set --device cpu"
        )


def check_batch_invariant(layers: tuple[AttentionLayer, ...], *, is_native: bool) -> None:
    """Raises UnsuitableDevice for a model without batch-invariant kernels on CUDA."""
    what = None
    if not is_native:
        what = "models that transformers runs, because cuBLAS computes their products"
    elif not suits_xformers(layers):
        what = "models that cap attention scores, because xFormers' kernel does not support caps"
    if what is not None:
        raise UnsuitableDevice(
            f"batch_invariant is not supported on CUDA for {what}; unset batch_invariant, or set "
            "--device cpu"
        )


def load_xformers() -> None:
    """Imports xFormers with its CUDA library. Raises UnsuitableDevice if this fails.

    The published library needs the runtime of CUDA 12. A torch built for CUDA 13 does not contain
    this runtime, so it is loaded into the process first.
    """
    # The file in the package nvidia-cuda-runtime-cu12, or the name with which the loader finds it
    paths = (Path(folder, "nvidia/cuda_runtime/lib", RUNTIME_LIBRARY) for folder in sys.path)
    library = str(next(filter(Path.exists, paths), RUNTIME_LIBRARY))
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        logger.warning(
            "the CUDA runtime library %s cannot be loaded, and xFormers may fail", library
        )
    try:
        from services.worker.backends.cuda.xformers_ops import built_with_cuda  # noqa: PLC0415
    except ImportError as error:
        raise UnsuitableDevice(f"xFormers cannot be imported: {error}; run {_INSTALL}") from error
    if not built_with_cuda():
        raise UnsuitableDevice(
            f"xFormers did not load its CUDA library, which needs {RUNTIME_LIBRARY}; run pip "
            "install nvidia-cuda-runtime-cu12==12.9.79"
        )


def _scheme() -> str:
    """The sysconfig scheme with which Triton finds headers. It is not the default on Debian."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _suits(triton: str) -> bool:
    major, minor = triton.split(".")[:2]
    return _OLDEST_TRITON <= (int(major), int(minor)) < _TOO_NEW_TRITON


def _found(version: str | None) -> str:
    return "it is not installed" if version is None else f"{version} is installed"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _listed(values: tuple[int, ...]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}"
