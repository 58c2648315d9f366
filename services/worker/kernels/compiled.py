"""The compiled kernels: built for this processor when first needed, and kept.

What is kept is found by a hash of the sources, the flags, the processor's features, the compiler
and torch's version, so that a directory may be shared by different machines.
Processes that start at once wait for the one that compiles; one that is killed meanwhile leaves
nothing half done.
"""

import ctypes
import fcntl
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

NAME = "stepwell_kernels"
_SOURCES = Path(__file__).parent / "cpp"
_FLAGS = ("-O3", "-march=native", "-std=gnu++20", "-fopenmp", "-fno-math-errno", "-w")
_NEEDED_FEATURES = frozenset({"avx2", "fma"})
_POLL_SECONDS = 0.2
_TOLD_EVERY_SECONDS = 5.0


class NotCompiled(Exception):
    """There are no compiled kernels here; the message, a clause, says why."""


def default_cache_directory() -> Path:
    """$XDG_CACHE_HOME/stepwell, by default ~/.cache/stepwell."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "stepwell"


def load_compiled(cache: Path, checkpoint_reached: Callable[[], None]) -> ctypes.CDLL:
    """The library, compiled first where the cache lacks it. Raises NotCompiled.

    `checkpoint_reached` is called several times a second meanwhile, and may raise to give up.
    """
    features = processor_features()
    if not features >= _NEEDED_FEATURES:
        raise NotCompiled("the processor has no AVX2")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    directory = cache / f"kernels-{_key(features, compiler)}"
    library = directory / f"{NAME}.so"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(directory.with_suffix(".lock"), checkpoint_reached):
            if not library.exists():
                _check_tools(compiler)
                _compile(directory, checkpoint_reached)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NotCompiled(f"the compiled kernels cannot be kept or loaded: {error}") from error


def processor_features() -> frozenset[str]:
    """Instruction sets, in Linux's names; empty where they are unknown or not x86's."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _key(features: frozenset[str], compiler: str | None) -> str:
    digest = sha256()
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((_FLAGS, sorted(features), compiler, torch.__version__)).encode())
    return digest.hexdigest()[:16]


def _check_tools(compiler: str | None) -> None:
    if compiler is None:
        raise NotCompiled("there is no C++ compiler")
    if shutil.which("ninja", path=_search_path()) is None:
        raise NotCompiled("there is no ninja, which torch builds extensions with")


def _search_path() -> str:
    """The PATH, and before it where this interpreter's own programs are."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


@contextmanager
def _locked(path: Path, checkpoint_reached: Callable[[], None]) -> Iterator[None]:
    """Holds a lock that ends with the process."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                checkpoint_reached()
                time.sleep(_POLL_SECONDS)
        yield


def _compile(directory: Path, checkpoint_reached: Callable[[], None]) -> None:
    """Compiles aside, then moves the result to `directory` at once."""
    logger.info("compiling kernels for this processor, once")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=directory.parent, ignore_cleanup_errors=True) as aside:
        failures: list[BaseException] = []

        def work() -> None:
            try:
                _run_build(Path(aside))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work, name="compile", daemon=True)
        thread.start()
        told = begun
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            checkpoint_reached()
            if time.monotonic() - told >= _TOLD_EVERY_SECONDS:
                told = time.monotonic()
                logger.info("compiling kernels: %.0f s", told - begun)
        if failures:
            raise NotCompiled(f"compiling failed: {_reason(failures[0])}") from failures[0]
        directory.mkdir(exist_ok=True)
        (Path(aside) / f"{NAME}.so").replace(directory / f"{NAME}.so")
    logger.info("compiled kernels in %.1f s", time.monotonic() - begun)


def _run_build(directory: Path) -> None:
    """torch's loader for extensions, in a process of its own: it reads the PATH and the compiler
    from the environment, and what goes wrong in it stays there.
    """
    program = (
        "import sys; from torch.utils.cpp_extension import load; load(sys.argv[1], "
        "sys.argv[4:], extra_cflags=sys.argv[3].split(), extra_ldflags=['-fopenmp'], "
        "build_directory=sys.argv[2], is_python_module=False)"
    )
    sources = sorted(str(path) for path in _SOURCES.glob("*.cpp"))
    subprocess.run(
        [sys.executable, "-c", program, NAME, str(directory), " ".join(_FLAGS), *sources],
        env=os.environ | {"PATH": _search_path()},
        check=True,
        capture_output=True,
        text=True,
    )


def _reason(error: BaseException) -> str:
    """The line of a compiler's output that says what is wrong."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = [line.strip() for line in f"{error.stdout}\n{error.stderr}".split("\n") if line]
    telling = [line for line in lines if "error:" in line]
    return (telling or lines[-1:] or ["no reason given"])[0]
