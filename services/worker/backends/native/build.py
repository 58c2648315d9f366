"""Compiles the kernels' sources in parallel and links them. Needs a C++ compiler with OpenMP."""

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from services.common.process.processors import usable_processors

NAME = "stepwell_kernels"
SOURCES = Path(__file__).parent / "cpp"
FLAGS = (
    *("-O3", "-std=gnu++20", "-fopenmp", "-fno-math-errno", "-w", "-fPIC"),
    "-ffp-contract=off",  # see cpp/vector.h
)
"""Compiler flags that are the same for every processor."""
_POLL_SECONDS = 0.2


class BuildFailed(Exception):
    """The compiler failed. The message is the line of its output with the error."""


@contextmanager
def built(
    compiler: str, flags: Sequence[str], checkpoint_reached: Callable[[], None]
) -> Iterator[Path]:
    """Compiles the library with FLAGS and `flags`, in a temporary directory that is removed
    afterwards. Raises BuildFailed, or OSError if the compiler cannot be started.

    `checkpoint_reached` is called several times a second, and may raise to abort.
    """
    with tempfile.TemporaryDirectory(prefix="stepwell-", ignore_cleanup_errors=True) as directory:
        library = Path(directory) / f"{NAME}.so"
        objects = {
            str(source): str(library.with_name(f"{source.stem}.o"))
            for source in sorted(SOURCES.glob("*.cpp"))
        }
        command = (compiler, *FLAGS, *flags)
        compiling = [(*command, "-c", source, "-o", to) for source, to in objects.items()]
        _run(compiling, checkpoint_reached)
        _run([(*command, "-shared", *objects.values(), "-o", str(library))], checkpoint_reached)
        yield library


def _run(commands: Sequence[Sequence[str]], checkpoint_reached: Callable[[], None]) -> None:
    """Runs commands, as many at once as there are usable processors. If this function raises,
    running commands are killed.
    """
    processors = usable_processors()
    most = processors.within_quota(processors.num_allowed)
    waiting, running = list(reversed(commands)), list[subprocess.Popen[str]]()
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as scope:
        while waiting or running:
            while waiting and len(running) < most:
                command = waiting.pop()
                running.append(scope.enter_context(subprocess.Popen(command, text=True, **pipes)))
                scope.callback(running[-1].kill)
            for process in tuple(running):
                if (output := _output_within(_POLL_SECONDS, process)) is None:
                    checkpoint_reached()
                elif process.returncode:
                    raise BuildFailed(_reason(output))
                else:
                    running.remove(process)


def _output_within(seconds: float, process: subprocess.Popen[str]) -> str | None:
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        return None


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line]
    for sign in (os.strerror(errno.ENOSPC), "error:"):
        found = [line for line in lines if sign in line]
        if found:
            return found[0]
    return (lines[-1:] or ["the compiler printed no reason"])[0]
