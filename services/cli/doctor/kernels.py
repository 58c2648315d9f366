"""Finds out which kernels compute on this machine, and why the other kernels are not used."""

import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.cli.doctor.report import Fact
from services.worker.backends.choices import KernelsSetting, SumOrder
from services.worker.backends.kernels import Kernels
from services.worker.backends.native import prebuilt, tiles
from services.worker.backends.native.compiled import default_cache_directory, processor_features
from services.worker.backends.native.kernels import NativeKernels
from services.worker.platforms.cpu_kernels import select_kernels


def choose_kernels(progress: Callable[[str], None]) -> tuple[Kernels, list[Fact]]:
    """Returns the kernels that a worker would select, and facts about the choice. Compiles the
    kernels if they are not in the cache. `progress` is called with each line of the log.
    """
    with _logged(progress) as lines:
        kernels = select_kernels(KernelsSetting.AUTO, default_cache_directory(), lambda: None)
    features = processor_features()
    is_native = isinstance(kernels, NativeKernels)
    has_tiles = kernels.bfloat16_order is SumOrder.TILES
    usable = features if has_tiles else features - tiles.FEATURES
    used = _prebuilt_kind(usable) if is_native else None
    chosen = "torch" if not is_native else used or "compiled"
    reasons = prebuilt_reasons(features, usable, used)
    refusal = _tiles_refusal(features)
    return kernels, [
        Fact("chosen", chosen, chosen),
        Fact("log", lines, "\n".join(lines)),
        Fact("prebuilt", reasons, "\n".join(f"{name}: {text}" for name, text in reasons.items())),
        Fact("tiles", {"refusal": refusal}, refusal or "Linux permits them (AMX)"),
    ]


def prebuilt_reasons(
    features: frozenset[str],
    usable: frozenset[str],
    used: str | None,
    directory: Path = prebuilt.DIRECTORY,
) -> dict[str, str]:
    """Maps each kind of prebuilt kernels to `used`, or to the reason why it is not used. `features`
    are the processor's features, of which this process may use `usable`.
    """
    reasons: dict[str, str] = {}
    for kind in prebuilt.kinds_for(platform.machine()):
        missing = sorted(kind.features - features)
        if missing:
            reason = f"the processor lacks {' '.join(missing)}"
        elif not kind.features <= usable:
            reason = "this process may not use tiles"
        elif kind.name == used:
            reason = "used"
        elif not (directory / kind.name).is_dir():
            reason = "not part of this installation"
        else:
            has_better = "used" in reasons.values()
            reason = f"{used} is better" if has_better else "its files are damaged"
        reasons[kind.name] = reason
    return reasons


def _prebuilt_kind(usable: frozenset[str]) -> str | None:
    with suppress(OSError):
        library = prebuilt.load_prebuilt(usable)
        return None if library is None else Path(library._name).parent.name
    return None


def _tiles_refusal(features: frozenset[str]) -> str | None:
    missing = sorted(tiles.FEATURES - features)
    if missing:
        return f"the processor lacks {' '.join(missing)}"
    refusal = tiles.refusal()
    return None if refusal is None else f"Linux refuses the permission: {refusal}"


@contextmanager
def _logged(progress: Callable[[str], None]) -> Iterator[list[str]]:
    """Collects the log lines of the worker's modules instead of logging them. Of consecutive lines
    with the same format, which show progress, only the last line is kept.
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
