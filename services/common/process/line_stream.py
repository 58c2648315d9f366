"""Writes lines to a stream that may reject them for some time: to a full disk, or to a pipe or
terminal whose reader has stopped reading.
"""

import errno
import io
import select
from collections.abc import Callable
from typing import TextIO

_PATIENCE_MILLISECONDS = 100
"""Maximum time for which a write waits for the reader of a pipe. Then its lines are dropped, and so
are all later lines until the pipe has room. The writing process must not stop with its reader.
"""


class LineStream:
    """Writes lines directly, because the stream's buffers would keep lines that a full disk
    rejects. Lines that cannot be written are dropped. The next successful write begins with a line
    that reports the number of dropped lines.
    """

    def __init__(self, stream: TextIO, line_of: Callable[[str], str]) -> None:
        """`line_of` turns a message into a line with a line break."""
        self._stream = stream
        self._line_of = line_of
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        self._raw = raw if isinstance(raw, io.RawIOBase) else None
        self._room: select.poll | None = None
        if isinstance(raw, io.FileIO):
            self._room = select.poll()
            self._room.register(raw, select.POLLOUT)
        self._num_lost = 0
        self._why = ""
        self._is_cut = False
        """Whether the last line was written only partly."""

    def write(self, lines: str) -> None:
        """Writes one or more lines, each of which must end with a line break."""
        if self._num_lost:
            gap = f"{self._num_lost} lines before this one could not be written: {self._why}"
            if self._try_to_write(self._line_of(gap)):
                self._num_lost += lines.count("\n")
                return
            self._num_lost = 0
        self._num_lost += self._try_to_write(lines)

    def _try_to_write(self, lines: str) -> int:
        """Returns the number of lines that could not be written."""
        encoded = lines.encode(self._stream.encoding or "utf-8", "backslashreplace")
        left = b"\n" + encoded if self._is_cut else encoded
        try:
            self._stream.flush()
            while left:
                num_written = self._write(left)
                self._is_cut = not left[:num_written].endswith(b"\n")
                left = left[num_written:]
        except OSError as error:
            self._why = error.strerror or str(error)
        return left[-len(encoded) :].count(b"\n")

    def _write(self, encoded: bytes) -> int:
        if self._raw is None:
            self._stream.write(encoded.decode(self._stream.encoding or "utf-8"))
            self._stream.flush()
            return len(encoded)
        num_written = None
        patience = 0 if self._num_lost else _PATIENCE_MILLISECONDS
        if self._room is None or self._room.poll(patience):
            # A pipe with room accepts PIPE_BUF bytes at once. A longer write could wait.
            end = encoded.rfind(b"\n", 0, select.PIPE_BUF) + 1
            num_written = self._raw.write(encoded[: end or select.PIPE_BUF])
        if num_written is None:
            raise BlockingIOError(errno.EAGAIN, "the reader does not read")
        return num_written
