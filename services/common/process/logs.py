"""Writes logs as text or JSON, with one line for each event. Lines have the current trace's ids."""

import asyncio
import enum
import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import Context, ContextVar
from functools import lru_cache
from typing import Any, TextIO

from opentelemetry import trace

from services.common.process.line_stream import LineStream

REQUEST_FIELDS: ContextVar[Mapping[str, str] | None] = ContextVar("request_fields", default=None)
"""Fields of the request that the current task serves. They are added to the task's log lines."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn adds it for terminals
}

_GRPC = "grpc._cython.cygrpc"
_WRITE_FAILED = "ExecuteBatchError"
"""The name of the error that grpc.aio raises if a connection ends during a write."""


class LogFormat(enum.Enum):
    TEXT = "text"
    JSON = "json"


class LogLevel(enum.Enum):
    """The least severe level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure_logs(service: str, level: LogLevel, style: LogFormat) -> None:
    """Sends the process's logs to standard error in the given style."""
    handler = _LinesHandler(sys.stderr)
    formatter = _JsonFormatter if style is LogFormat.JSON else _TextFormatter
    handler.setFormatter(formatter(service))
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    logging.getLogger(_GRPC).addFilter(_says_more_than_that_a_peer_left)
    # Prevents `logging` from computing values that no log line contains ("Optimization" in the
    # documentation of `logging`).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def _says_more_than_that_a_peer_left(record: logging.LogRecord) -> bool:
    """Returns False for tracebacks that grpc.aio logs when a client disconnects during a write.
    Such a traceback is not needed, since the disconnection also ends the call with an error.
    """
    error = record.exc_info[0] if record.exc_info else None
    return error is None or error.__name__ != _WRITE_FAILED


class _LinesHandler(logging.StreamHandler[TextIO]):
    """Writes the lines of one event loop iteration together, right after the iteration.

    Each write is a system call, and a busy server logs several calls in an iteration. Only lines of
    level info are delayed. All other lines are written at once, after the delayed lines, since they
    help to analyse a failed process. Lines from threads without an event loop are also written at
    once. Lines that cannot be written, for example because of a full disk, are counted, and the
    count is logged later.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines = LineStream(stream, self._gap)
        self._waiting: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that will write the delayed lines. None if no line is delayed."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.append(self.format(record) + self.terminator)
        except Exception:
            self.handleError(record)
            return
        loop = _running_loop() if record.levelno == logging.INFO else None
        if loop is None:
            self.flush()
        elif loop is not self._loop:
            self._loop = loop
            # In an empty context, since REQUEST_FIELDS of the current context are one request's.
            loop.call_soon(self.flush, context=Context())

    def flush(self) -> None:
        self.acquire()
        try:
            waiting, self._waiting, self._loop = self._waiting, [], None
            if waiting:
                self._lines.write("".join(waiting))
        except Exception:
            self.handleError(logging.makeLogRecord({"msg": "".join(waiting)}))
        finally:
            self.release()

    def _gap(self, message: str) -> str:
        fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        record = logging.makeLogRecord(fields | {"msg": message})
        # In an empty context, since REQUEST_FIELDS of the current context are one request's.
        return Context().run(self.format, record) + self.terminator


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a line, which are the fields in `extra` and the fields of the request being
    served. If these fields have no trace id, the ids of the current trace and span are added.
    """
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    fields.update(REQUEST_FIELDS.get() or {})
    if "trace_id" not in fields:
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            fields["trace_id"] = trace.format_trace_id(context.trace_id)
            fields["span_id"] = trace.format_span_id(context.span_id)
    return fields


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = _clock(int(record.created))
        fields = "".join([f" {key}={value}" for key, value in _fields(record).items()])
        line = (
            f"{clock} {record.levelname.lower():7} {self._service}: {record.getMessage()}{fields}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@lru_cache(maxsize=2)
def _clock(seconds: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


class _JsonFormatter(_TextFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
