"""The compiled kernels: built ahead, or else for this processor when first needed, and cached.

The cache is indexed by a hash of the sources, the flags, the processor's features, the compiler and
torch's version, so that different machines may share a directory. Of processes that start together
one compiles and the others wait; if it is killed, no incomplete library is left behind. Without a
directory that can be written to, each process compiles for itself.
"""

import ctypes
import errno
import fcntl
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch

from services.worker.backends.native.cached_library import CachedLibrary
from services.worker.backends.native.prebuilt import FLAGS, NAME, SOURCES, X86, load_prebuilt

logger = logging.getLogger(__name__)

_FLAGS = ("-march=native", *FLAGS)
_NEEDED_FEATURES = frozenset({"avx2", "fma"})
_POLL_SECONDS = 0.2
_LOG_INTERVAL_SECONDS = 5.0


class NotCompiled(Exception):
    """The kernels cannot be compiled or loaded here; the message is a clause with the reason."""


def default_cache_directory() -> Path:
    """$XDG_CACHE_HOME/stepwell, by default ~/.cache/stepwell."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "stepwell"


def load_compiled(cache: Path, checkpoint_reached: Callable[[], None]) -> ctypes.CDLL:
    """The library that was built ahead, else from the cache, else compiled now. Raises NotCompiled.

    `checkpoint_reached` is called several times a second meanwhile, and may raise to stop it.
    """
    features = processor_features()
    if not features >= _NEEDED_FEATURES:
        raise NotCompiled("the processor has no AVX2")
    with suppress(OSError):
        if (prebuilt := load_prebuilt(features)) is not None:
            return prebuilt
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    directory = cache / f"kernels-{_key(features, compiler)}"
    cached = CachedLibrary(directory, NAME)
    try:
        library = cached.load()
        if library is None:
            _check_tools(compiler)
            library = _compile_once(cached, directory.with_suffix(".lock"), checkpoint_reached)
    except OSError as error:
        raise NotCompiled(f"the kernels cannot be compiled or loaded: {error}") from error
    return library


def processor_features() -> frozenset[str]:
    """Instruction sets, by Linux's names; empty if they are unknown or not x86's."""
    if platform.machine() not in X86:
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _key(features: frozenset[str], compiler: str | None) -> str:
    digest = sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((_FLAGS, sorted(features), compiler, torch.__version__)).encode())
    return digest.hexdigest()[:16]


def _check_tools(compiler: str | None) -> None:
    if compiler is None:
        raise NotCompiled("there is no C++ compiler")
    if shutil.which("ninja", path=_search_path()) is None:
        raise NotCompiled("there is no ninja, which torch builds extensions with")


def _search_path() -> str:
    """The directory of this interpreter's programs, then the PATH."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def _compile_once(
    cached: CachedLibrary, lock: Path, checkpoint_reached: Callable[[], None]
) -> ctypes.CDLL:
    """Waits for the lock, then loads what another process compiled meanwhile, or compiles."""
    with ExitStack() as scope:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            scope.enter_context(_locked(lock, checkpoint_reached))
        except OSError as error:
            _warn_not_cached(lock.parent, error)
            return _compile(None, checkpoint_reached)
        library = cached.load()
        if library is None:
            if cached.exists:
                logger.warning("the cached kernels are damaged or incomplete")
            library = _compile(cached, checkpoint_reached)
        return library


@contextmanager
def _locked(path: Path, checkpoint_reached: Callable[[], None]) -> Iterator[None]:
    """Holds a lock on the file, which the end of the process releases too."""
    with path.open("w") as file:
        progress = _WaitLog("waiting for another process to compile kernels")
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            checkpoint_reached()
            progress.update()
            time.sleep(_POLL_SECONDS)
        yield


class _WaitLog:
    """Logs at intervals what this process waits for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = self._logged = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def update(self) -> None:
        if time.monotonic() - self._logged >= _LOG_INTERVAL_SECONDS:
            self._logged = time.monotonic()
            logger.info("%s: %.0f s", self._what, self.seconds)


def _compile(cached: CachedLibrary | None, checkpoint_reached: Callable[[], None]) -> ctypes.CDLL:
    """Compiles in a temporary directory, and stores the result in the cache if there is one."""
    once = "" if cached is None else ", once"
    logger.info("compiling kernels for this processor%s", once)
    with tempfile.TemporaryDirectory(prefix="stepwell-", ignore_cleanup_errors=True) as directory:
        progress = _WaitLog("compiling kernels")
        with _start_build(Path(directory)) as build:
            try:
                while (output := _output_within(_POLL_SECONDS, build)) is None:
                    checkpoint_reached()
                    progress.update()
            except BaseException:
                build.kill()
                raise
        if build.returncode:
            raise NotCompiled(f"compiling failed: {_reason(output)}")
        logger.info("compiled kernels in %.1f s", progress.seconds)
        compiled = Path(directory) / f"{NAME}.so"
        return (cached and _store(cached, compiled)) or ctypes.CDLL(str(compiled))


def _store(cached: CachedLibrary, compiled: Path) -> ctypes.CDLL | None:
    try:
        cached.put(compiled)
    except OSError as error:
        _warn_not_cached(cached.directory, error)
        return None
    return cached.load()


def _warn_not_cached(directory: Path, error: OSError) -> None:
    logger.warning("compiled kernels cannot be cached in %s: %s", directory, error.strerror)


def _start_build(directory: Path) -> subprocess.Popen[str]:
    """Runs torch's loader for extensions in a process of its own, because the loader reads the PATH
    and the compiler from the environment.
    """
    program = (
        "import sys; from torch.utils.cpp_extension import load; load(sys.argv[1], "
        "sys.argv[4:], extra_cflags=sys.argv[3].split(), extra_ldflags=['-fopenmp'], "
        "build_directory=sys.argv[2], is_python_module=False)"
    )
    sources = sorted(str(path) for path in SOURCES.glob("*.cpp"))
    return subprocess.Popen(
        [sys.executable, "-c", program, NAME, str(directory), " ".join(_FLAGS), *sources],
        env=os.environ | {"PATH": _search_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _output_within(seconds: float, build: subprocess.Popen[str]) -> str | None:
    try:
        return build.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return None


def _reason(output: str) -> str:
    """The line of the compiler's output that names the error."""
    lines = [line.strip() for line in output.splitlines() if line]
    for sign in (os.strerror(errno.ENOSPC), "error:"):
        found = [line for line in lines if sign in line]
        if found:
            return found[0]
    return (lines[-1:] or ["no reason given"])[0]
