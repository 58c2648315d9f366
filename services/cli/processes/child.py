"""Starts a program as a child process, reads its output line by line, and waits for its end."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAUNCHER = Path(__file__).with_name("launcher.py")
_TAIL_LINES = 50
_LONGEST_LINE = 16_384
_CHUNK_BYTES = 65_536
_OUTPUT_GRACE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to run a program, and how to find out whether it is ready, live and drained."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    until_ready: Callable[[], Awaitable[None]]
    """Returns once the program is ready."""
    team: str | None = None
    """Children of one team start together, and end when one of them ends. None means no team."""
    liveness_address: str | None = None
    """The address for liveness checks, host:port or unix:PATH. None means no liveness checks."""
    silence_seconds: float = 2.0
    """Seconds without a reply to liveness checks after which the program counts as hung."""
    niceness: int = 0
    """The number that is added to the supervisor's niceness. Higher niceness is lower priority."""
    prepare: Callable[[], object] = lambda: None
    """This function is called before each start."""
    until_drained: Callable[[], Awaitable[None]] | None = None
    """Returns once the program has drained. It is set only for a program that drains at the first
    SIGTERM, but then still serves other children until the second SIGTERM.
    """


class Child:
    """A running child. Standard output and standard error are merged into one sequence of lines.
    The child leads its own session, so Ctrl-C in a terminal reaches only the supervisor. The kernel
    kills the child when the supervisor ends. A child must be started from the main thread.
    """

    def __init__(
        self, spec: ChildSpec, process: asyncio.subprocess.Process, on_line: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = process
        self._on_line = on_line
        self._output = asyncio.create_task(self._read_lines())

    @classmethod
    async def start(cls, spec: ChildSpec, on_line: Callable[[str], None]) -> "Child":
        spec.prepare()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), str(spec.niceness)),
            *spec.command,
            env=dict(spec.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(spec, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Returns the exit status, or the negative number of the signal that killed the process.
        Waits until the process has ended and its output is read. Output is read for at most one
        second after the end.
        """
        status = await self._process.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._output), _OUTPUT_GRACE_SECONDS)
        return status

    async def wait_drained(self) -> None:
        """Waits until the process has ended or, with `until_drained`, has drained."""
        ended = asyncio.ensure_future(self.wait())
        either: set[asyncio.Future[Any]] = {ended}
        if self.spec.until_drained is not None:
            either.add(asyncio.ensure_future(self.spec.until_drained()))
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in either:
                task.cancel()
            await asyncio.gather(*either, return_exceptions=True)

    def terminate(self) -> None:
        if not self.ended:
            self._process.terminate()

    def kill(self) -> None:
        if not self.ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _read_lines(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._add_line(line)
            if len(rest) > _LONGEST_LINE:
                self._add_line(rest)
                rest = b""
        if rest:
            self._add_line(rest)

    def _add_line(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode(errors="replace").rstrip()
        self.tail.append(text)
        self._on_line(text)


def describe_exit(status: int) -> str:
    """An exit status in words, such as `exit status 1` or `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
