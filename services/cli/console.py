"""The output of `stepwell up` on standard error: the services' and the command's own lines."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from services.common.process.line_stream import LineStream

_COLOURS = {"gateway": 36, "scheduler": 33, "kvpool": 35, "worker": 32, "up": 1}
_TAIL_SHOWN = 8


def shows_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether `stream` is a terminal and NO_COLOR is not set (https://no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR")


class Console:
    """A supervisor's `Observer` that writes for people, with colours if `colour` is set.

    `quiet` drops lines of the services and of normal progress. With `raw`, the field `process` with
    the service's name is added to each JSON line of a service, and the command's own lines are JSON
    too. Lines that cannot be written are dropped, and their number is written once the stream
    accepts lines again. `name_width` is the number of characters of the longest service name.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        colour: bool,
        quiet: bool,
        raw: bool,
        name_width: int = len("scheduler"),
    ) -> None:
        self._stream = LineStream(stream, self._gap)
        self._name_width = name_width
        self._colour = colour
        self._quiet = quiet
        self._raw = raw

    def line(self, name: str, text: str) -> None:
        if not self._quiet:
            self._write(_named(name, text) if self._raw else f"{self._prefix(name)}{text}")

    def note(self, text: str) -> None:
        """Writes a line about the command's progress, unless `quiet` is set."""
        if not self._quiet:
            self._own(text, "info")

    def warn(self, text: str) -> None:
        """Writes a warning, even if `quiet` is set."""
        self._own(text, "warning")

    def _own(self, text: str, level: str) -> None:
        self._write(self._own_line(text, level))

    def _own_line(self, text: str, level: str) -> str:
        if not self._raw:
            return f"{self._prefix('up')}{text}"
        clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"process": "up", "time": clock, "level": level, "service": "up"}
        return json.dumps(line | {"message": text})

    def _gap(self, message: str) -> str:
        return self._own_line(message, "warning") + "\n"

    def ready(self, name: str, seconds: float, num_restarts: int) -> None:
        again = f" again (restart {num_restarts})" if num_restarts else ""
        write = self.warn if num_restarts else self.note
        write(f"{name} is ready{again} after {seconds:.1f} s")

    def hung(self, name: str, reason: str) -> None:
        self.warn(f"{name} is killed: {reason}")

    def died(
        self, name: str, status: str, tail: Sequence[str], delay_seconds: float, num_deaths: int
    ) -> None:
        times = f", {num_deaths} times in a row" if num_deaths > 1 else ""
        self.warn(f"{name} died: {status}{times}; starting it again in {delay_seconds:.1f} s")
        self.tail(name, tail)

    def tail(self, name: str, lines: Sequence[str]) -> None:
        """Writes the last lines of a service that ended."""
        for line in list(lines)[-_TAIL_SHOWN:]:
            self.warn(f"  last lines of {name}: {line}")

    def stopping(self, name: str) -> None:
        self.note(f"stopping {name}")

    def killed(self, name: str, seconds: float) -> None:
        self.warn(f"{name} did not stop within {seconds:.0f} s and is killed")

    def _prefix(self, name: str) -> str:
        prefix = f"{name:<{self._name_width}} | "
        if not self._colour:
            return prefix
        return f"\033[{_COLOURS.get(name.partition('-')[0], 0)}m{prefix}\033[0m"

    def _write(self, text: str) -> None:
        with suppress(ValueError):  # the stream is closed
            self._stream.write(text + "\n")


def _named(name: str, text: str) -> str:
    """Adds the service's name, such as worker-1, to a JSON line. Other lines stay unchanged."""
    is_object = text.startswith('{"')
    return f'{{"process": {json.dumps(name)}, {text[1:]}' if is_object else text


def announce(text: str) -> None:
    """Writes a line to standard output, for people and for programs that wait for this line."""
    with suppress(OSError, ValueError):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
