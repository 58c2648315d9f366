"""Compiles C++ programs that include the kernels' sources."""

import ctypes
import shutil
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

from services.worker.backends.native import tiles
from services.worker.backends.native.build import FLAGS, SOURCES
from services.worker.backends.native.cached_library import CachedLibrary
from services.worker.backends.native.compiled import default_cache_directory, processor_features

EMULATED = ("-march=native", "-O1", *tiles.EMULATED_FLAGS)
"""Compiler flags for emulated tiles. With -O1 the tests take half of the time of -O3."""


def compiled_program(
    program: str,
    scratch: Path,
    flags: Sequence[str] = EMULATED,
    features: Collection[str] = ("avx2", "fma"),
) -> ctypes.CDLL:
    """Compiles a program to a library, which later sessions reuse. `scratch` is an existing
    directory for the source. Skips the test if there is no compiler or if the processor lacks one
    of the `features`.
    """
    compiler, own_features = shutil.which("c++"), sorted(processor_features())
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    if missing := set(features) - set(own_features):
        pytest.skip(f"the processor has no {', '.join(sorted(missing))}")
    command = [compiler, *FLAGS, *flags, "-I", str(SOURCES), "-shared"]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    key = sha256(repr((program, command, version.stdout, own_features)).encode())
    for path in sorted(SOURCES.iterdir()):
        key.update(path.name.encode() + b"\0" + path.read_bytes())
    cached = CachedLibrary(default_cache_directory() / f"program-{key.hexdigest()[:16]}", "program")
    library = cached.load()
    if library is None:
        source, compiled = scratch / "program.cpp", scratch / "program.so"
        source.write_text(program)
        subprocess.run([*command, str(source), "-o", str(compiled)], check=True)
        with suppress(OSError):  # a library that cannot be cached is compiled again
            cached.put(compiled)
        library = ctypes.CDLL(str(compiled))
    return library
