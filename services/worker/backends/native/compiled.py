"""Loads the compiled kernels. If there are no prebuilt kernels, they are compiled for this
processor at first use, and cached.

The cache key is a hash of the sources, the flags, the processor's features and the compiler, so
that different machines may share a directory. If several processes start together, one compiles and
the others wait. If the compiling process is killed, no incomplete library remains. Without a
writable directory, each process compiles for itself.
"""

import ctypes
import fcntl
import functools
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from services.worker.backends.native import tiles
from services.worker.backends.native.build import FLAGS, NAME, SOURCES, BuildFailed, built
from services.worker.backends.native.cached_library import CachedLibrary
from services.worker.backends.native.prebuilt import ARM, kinds_for, load_prebuilt

logger = logging.getLogger(__name__)

_THIS_PROCESSOR = ("-mcpu=native" if platform.machine() in ARM else "-march=native",)
_POLL_SECONDS = 0.2
_LOG_INTERVAL_SECONDS = 5.0


class NotCompiled(Exception):
    """The kernels cannot be compiled or loaded on this machine. The message is the reason."""


def default_cache_directory() -> Path:
    """$XDG_CACHE_HOME/stepwell, or ~/.cache/stepwell if the variable is not set."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "stepwell"


def load_compiled(cache: Path, checkpoint_reached: Callable[[], None]) -> ctypes.CDLL:
    """Loads the prebuilt library if there is one, otherwise the cached library. If there is
    neither, compiles the library. Raises NotCompiled, and any error that `checkpoint_reached`
    raises.
    """
    features = processor_features()
    if not (features >= {"avx2", "fma"} or "asimd" in features):
        raise NotCompiled("the processor has neither AVX2 nor NEON")
    if features >= tiles.FEATURES:
        reason = tiles.refusal()
        if reason is None:
            library = _load(features, cache, checkpoint_reached)
            if library.tile_palettes() > 0:
                return library
            reason = "the processor reports no tile palette"
        _warn_without_tiles(reason)
    return _load(features - tiles.FEATURES, cache, checkpoint_reached)


@functools.cache
def _warn_without_tiles(reason: str) -> None:
    """Logs the reason only once, because a worker may load the library several times."""
    logger.warning(
        "the compiled kernels do not use the processor's tile registers (AMX): %s", reason
    )


def _load(
    features: frozenset[str], cache: Path, checkpoint_reached: Callable[[], None]
) -> ctypes.CDLL:
    """Loads the library for a processor with these features, with tile registers if it has them."""
    with suppress(OSError):
        if (prebuilt := load_prebuilt(features)) is not None:
            return prebuilt
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    flags = _THIS_PROCESSOR + (tiles.FLAGS if features >= tiles.FEATURES else ())
    directory = cache / f"kernels-{_key(flags, features, compiler)}"
    cached = CachedLibrary(directory, NAME)
    try:
        library = cached.load()
        if library is None:
            if compiler is None:
                raise NotCompiled("no C++ compiler was found: install one, or name it in CXX")
            library = _compile_once(compiler, flags, cached, checkpoint_reached)
    except OSError as error:
        raise NotCompiled(f"the kernels cannot be compiled or loaded: {error}") from error
    return library


def processor_features(information: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns Linux's names of the processor's features. Empty if they are unknown, or if the
    architecture is neither x86-64 nor 64-bit ARM.
    """
    if not kinds_for(platform.machine()):
        return frozenset()
    try:
        lines = information.read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def _key(flags: tuple[str, ...], features: frozenset[str], compiler: str | None) -> str:
    digest = sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((flags, FLAGS, sorted(features), compiler)).encode())
    return digest.hexdigest()[:16]


def _compile_once(
    compiler: str,
    flags: tuple[str, ...],
    cached: CachedLibrary,
    checkpoint_reached: Callable[[], None],
) -> ctypes.CDLL:
    """Locks the cache entry. Loads the library if it is cached by now, else compiles it."""
    lock = cached.directory.with_suffix(".lock")
    with ExitStack() as scope:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            scope.enter_context(_locked(lock, checkpoint_reached))
        except OSError as error:
            _warn_not_cached(lock.parent, error)
            return _compile(compiler, flags, None, checkpoint_reached)
        library = cached.load()
        if library is None:
            if cached.exists:
                logger.warning(
                    "the cached kernels are damaged or incomplete, and are compiled again"
                )
            library = _compile(compiler, flags, cached, checkpoint_reached)
        return library


@contextmanager
def _locked(path: Path, checkpoint_reached: Callable[[], None]) -> Iterator[None]:
    """Within this context, locks the file. The lock is also released when the process ends."""
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


def _compile(
    compiler: str,
    flags: tuple[str, ...],
    cached: CachedLibrary | None,
    checkpoint_reached: Callable[[], None],
) -> ctypes.CDLL:
    once = "" if cached is None else ", once"
    logger.info("compiling kernels for this processor%s", once)
    progress = _WaitLog("compiling kernels")

    def wait() -> None:
        checkpoint_reached()
        progress.update()

    try:
        with built(compiler, flags, wait) as library:
            logger.info("compiled kernels in %.1f s", progress.seconds)
            return (cached and _store(cached, library)) or ctypes.CDLL(str(library))
    except BuildFailed as error:
        raise NotCompiled(f"the C++ compiler failed: {error}") from error


def _store(cached: CachedLibrary, compiled: Path) -> ctypes.CDLL | None:
    try:
        cached.put(compiled)
    except OSError as error:
        _warn_not_cached(cached.directory, error)
        return None
    return cached.load()


def _warn_not_cached(directory: Path, error: OSError) -> None:
    logger.warning(
        "the compiled kernels cannot be stored in %s, and are compiled again at the next start: %s",
        directory,
        error.strerror,
    )
