"""Kernels that are compiled in advance for several kinds of processors, as in the worker's images.

This command compiles them. It needs a C++ compiler, but not torch:

    python -m services.worker.backends.native.prebuilt DIRECTORY

Each kind of processor has its own directory, with the OpenMP library that the kernels need.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.worker.backends.native import tiles
from services.worker.backends.native.build import NAME, built
from services.worker.backends.native.cached_library import CachedLibrary

DIRECTORY = Path(__file__).parent / "prebuilt"
"""The directory of prebuilt kernels. It does not exist in a source tree."""
ARM = ("aarch64", "arm64")
"""Names of 64-bit ARM machines."""
_OPENMP = "libgomp.so.1"
_V3 = frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_NEON = frozenset({"asimd"})
_DOT = _NEON | {"atomics", "asimdrdm", "crc32", "asimddp"}
_DOT_FLAG = "-march=armv8.2-a+dotprod"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of processor, with the compiler's flags for it and Linux's names of its features."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


X86_KINDS = (
    Kind(
        "amx",
        (*_BF16_FLAGS, "-mavx512vbmi", *tiles.FLAGS),
        _BF16 | {"avx512vbmi"} | tiles.FEATURES,
    ),
    Kind("avx512-bf16-vbmi", (*_BF16_FLAGS, "-mavx512vbmi"), _BF16 | {"avx512vbmi"}),
    Kind("avx512-bf16", _BF16_FLAGS, _BF16),
    Kind("avx512", ("-march=x86-64-v4",), _V4),
    Kind("avx2", ("-march=x86-64-v3",), _V3),
)
ARM_KINDS = (
    Kind("neon-bf16", (f"{_DOT_FLAG}+bf16+i8mm",), _DOT | {"bf16", "i8mm"}),
    Kind("neon-dot", (_DOT_FLAG,), _DOT),
    Kind("neon", ("-march=armv8-a",), _NEON),
)
"""Kinds of processors of 64-bit ARM, best first."""


def kinds_for(machine: str) -> Sequence[Kind]:
    """Returns the kinds of processors of this machine type, empty if there are no kernels."""
    if machine in ARM:
        return ARM_KINDS
    return X86_KINDS if machine in ("x86_64", "AMD64") else ()


def load_prebuilt(features: Collection[str], directory: Path = DIRECTORY) -> ctypes.CDLL | None:
    """Loads the best complete library for a processor with these features. Returns None if there is
    none. Raises OSError if a complete library cannot be loaded.
    """
    for kind in (*X86_KINDS, *ARM_KINDS):
        if kind.features <= frozenset(features):
            library = CachedLibrary(directory / kind.name, NAME).load()
            if library is not None:
                return library
    return None


def build(directory: Path, kinds: Collection[Kind]) -> None:
    """Compiles the kernels of each kind. Raises BuildFailed or CalledProcessError."""
    compiler = os.environ.get("CXX", "c++")
    printed = subprocess.run(
        [compiler, f"-print-file-name={_OPENMP}"], check=True, capture_output=True, text=True
    )
    for kind in kinds:
        with built(compiler, (*kind.flags, "-Wl,-rpath,$ORIGIN"), lambda: None) as library:
            CachedLibrary(directory / kind.name, NAME).put(library)
        shutil.copyfile(printed.stdout.strip(), directory / kind.name / _OPENMP)


def main() -> None:
    """Compiles the kernels for this machine's architecture."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    if kinds := kinds_for(platform.machine()):
        build(directory, kinds)


if __name__ == "__main__":
    main()
