"""Writes lines to a stream that may reject them for some time, for example on a full disk."""

import errno
import io
import os
from collections.abc import Callable
from typing import TextIO


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
        num_written = self._raw.write(encoded)
        if num_written is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return num_written
