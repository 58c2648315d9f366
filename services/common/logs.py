"""Logs: one line an event, as text or JSON, with the ids of the current trace."""

import enum
import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from opentelemetry import trace

REQUEST_FIELDS: ContextVar[Mapping[str, str] | None] = ContextVar("request_fields", default=None)
"""What each line says of the request that the present task serves."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",  # uvicorn's, for terminals
}


class LogFormat(enum.Enum):
    """How a log line looks."""

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
    handler = logging.StreamHandler(sys.stderr)
    formatter = _JsonFormatter if style is LogFormat.JSON else _TextFormatter
    handler.setFormatter(formatter(service))
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    # What no line says is not looked up for each ("Optimization", in logging's documentation).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was passed as `extra`, the names of the request that is served and, where neither has a
    trace, the trace and span that are current.
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
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = (
            f"{clock} {record.levelname.lower():7} {self._service}: {record.getMessage()}{fields}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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
