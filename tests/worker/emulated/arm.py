"""Cross-compiles the library of native kernels for ARM, and calls it in an emulated process.

This requires Debian's packages g++-aarch64-linux-gnu and qemu-user.
"""

import ctypes
import mmap
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from services.worker.backends.native.build import FLAGS, NAME, SOURCES, built
from services.worker.backends.native.compiled import default_cache_directory
from services.worker.backends.native.prebuilt import Kind

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
CALLS = Path(__file__).with_name("calls.cpp")
_MEMORY_BYTES = 2**26
_LINE = 64


def require_tools() -> None:
    for tool in (COMPILER, EMULATOR[0]):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")


def compiled_for(kind: Kind) -> Path:
    """A processor kind's library and the program `calls`. Later test sessions reuse both."""
    digest = sha256(repr((COMPILER, FLAGS, kind.flags)).encode())
    for source in (*sorted(SOURCES.iterdir()), CALLS):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    directory = default_cache_directory() / f"kernels-{kind.name}-{digest.hexdigest()[:16]}"
    if not directory.exists():
        new = directory.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        with built(COMPILER, kind.flags, lambda: None) as library:
            shutil.copyfile(library, new / library.name)
        compile_calls(new)
        new.rename(directory)
    return directory / f"{NAME}.so"


def compile_calls(directory: Path) -> None:
    subprocess.run([COMPILER, "-O1", str(CALLS), "-o", str(directory / "calls")], check=True)


class EmulatedLibrary:
    """Calls the functions of a library through the program `calls` in the library's directory."""

    def __init__(self, library: Path, scratch: Path) -> None:
        memory = scratch / "memory"
        memory.write_bytes(b"")
        with memory.open("r+b") as file:
            file.truncate(_MEMORY_BYTES)
            self._memory = np.frombuffer(mmap.mmap(file.fileno(), _MEMORY_BYTES), np.uint8)
        self._used = 0
        command = (*EMULATOR, library.with_name("calls"), library, memory)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._moved_by = self._answer() - self._memory.ctypes.data

    def close(self) -> None:
        self._process.communicate()

    def clear(self) -> None:
        self._used = 0

    def empty(self, shape: tuple[int, ...] | int, dtype: type) -> np.ndarray:
        """A new array in memory that the library can read and write. Its elements are arbitrary."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        begin, self._used = self._used, self._used + -(-size // _LINE) * _LINE
        assert self._used <= _MEMORY_BYTES
        return self._memory[begin : begin + size].view(dtype).reshape(shape)

    def copy(self, array: np.ndarray) -> np.ndarray:
        copied = self.empty(array.shape, array.dtype.type)
        copied[...] = array
        return copied

    def address(self, array: np.ndarray | None) -> int:
        """The address of an array or of a part of it, in the library's process. 0 for None."""
        return 0 if array is None else array.ctypes.data + self._moved_by

    def call(
        self, name: str, *arguments: np.ndarray | ctypes.Structure | int | None, real: float = 0
    ) -> int:
        """Calls a function with `arguments` (arrays and structures by address) and a float
        `real`.
        """
        numbers = [str(self._number(argument)) for argument in arguments]
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join((name, repr(real), *numbers)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _number(self, argument: np.ndarray | ctypes.Structure | int | None) -> int:
        if isinstance(argument, ctypes.Structure):
            argument = self.copy(np.frombuffer(bytes(argument), np.uint8))
        return argument if isinstance(argument, int) else self.address(argument)

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the emulated process ended with status {self._process.wait()}"
        return int(line)
