"""Which kernels compute on this machine, and why the others do not."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.cli.doctor.report import Fact
from services.worker.backends.choices import KernelsSetting
from services.worker.backends.kernels import Kernels
from services.worker.backends.native import prebuilt, tiles
from services.worker.backends.native.compiled import default_cache_directory, processor_features
from services.worker.backends.native.kernels import NativeKernels
from services.worker.platforms.cpu_kernels import select_kernels


def choose_kernels(progress: Callable[[str], None]) -> tuple[Kernels, list[Fact]]:
    """The kernels that a worker would select, and the facts of the choice. Compiles them if they
    are not in the cache. `progress` gets the lines of the log.
    """
    with _logged(progress) as lines:
        kernels = select_kernels(KernelsSetting.AUTO, default_cache_directory(), lambda: None)
    features = processor_features()
    used = _prebuilt_kind(features) if isinstance(kernels, NativeKernels) else None
    chosen = "torch" if not isinstance(kernels, NativeKernels) else used or "compiled"
    reasons: dict[str, str] = {}
    for kind in prebuilt.KINDS:
        is_better = "used" in reasons.values()
        usable = f"{used} is better" if is_better else "its files are damaged"
        otherwise = "used" if kind.name == used else usable
        reasons[kind.name] = _refusal_of(kind, features) or otherwise
    refusal = _tiles_refusal(features)
    return kernels, [
        Fact("chosen", chosen, chosen),
        Fact("log", lines, "\n".join(lines)),
        Fact("prebuilt", reasons, "\n".join(f"{name}: {text}" for name, text in reasons.items())),
        Fact("tiles", {"refusal": refusal}, refusal or "Linux permits them (AMX)"),
    ]


def _prebuilt_kind(features: frozenset[str]) -> str | None:
    with suppress(OSError):
        library = prebuilt.load_prebuilt(features)
        return None if library is None else Path(library._name).parent.name
    return None


def _refusal_of(kind: prebuilt.Kind, features: frozenset[str]) -> str | None:
    missing = sorted(kind.features - features)
    if missing:
        return f"the processor lacks {' '.join(missing)}"
    return None if (prebuilt.DIRECTORY / kind.name).is_dir() else "not part of this installation"


def _tiles_refusal(features: frozenset[str]) -> str | None:
    missing = sorted(tiles.FEATURES - features)
    if missing:
        return f"the processor lacks {' '.join(missing)}"
    refusal = tiles.refusal()
    return None if refusal is None else f"Linux refuses the permission: {refusal}"


@contextmanager
def _logged(progress: Callable[[str], None]) -> Iterator[list[str]]:
    """Collects what the worker's modules log, in place of the log. Of successive records with the
    same format, which tell progress, the last one is kept.
    """
    lines: list[str] = []

    class Collector(logging.Handler):
        before = ""

        def emit(self, record: logging.LogRecord) -> None:
            if lines and record.msg == self.before:
                lines.pop()
            self.before = record.msg
            lines.append(record.getMessage())
            progress(lines[-1])

    logger, handler = logging.getLogger("services.worker"), Collector()
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
