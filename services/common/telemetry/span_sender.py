"""Sends spans to a collector from a separate thread, and counts the spans that are lost.

A collector that is down, slow or full causes only a loss of spans, because the queue is bounded and
spans that do not fit are dropped at once. Spans that the collector could not accept are sent again
until the collector has been unavailable for a minute. During this minute spans are lost only if the
queue is full.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter

from services.common.process.settings import SettingError
from services.common.telemetry.span_outage import DropReason, SpanOutage

LAST_EXPORT_SECONDS = 0.5
KEPT_SECONDS = 60.0
"""Seconds of unavailability after which spans that could not be sent are dropped."""
_MAX_BATCH_LINKS = 50_000
"""Limit on the links of a batch, of 35 bytes each, since collectors take messages of 4 MiB."""

logger = logging.getLogger(__name__)


class NotTaken(Exception):
    """The collector did not accept the spans. The message is the reason, a part of a log line."""

    def __init__(self, message: str, *, may_retry: bool) -> None:
        """`may_retry` is true if the collector may accept the same spans later."""
        super().__init__(message)
        self.may_retry = may_retry


class SpanSender(SpanProcessor):
    """Queues ended spans and exports them in batches. The standard variables set the queue size
    (OTEL_BSP_MAX_QUEUE_SIZE), the batch size (OTEL_BSP_MAX_EXPORT_BATCH_SIZE) and the interval in
    milliseconds (OTEL_BSP_SCHEDULE_DELAY).
    """

    def __init__(self, exporter: SpanExporter) -> None:
        """`exporter` must raise NotTaken for rejected spans. Raises SettingError."""
        self.num_sent = 0
        self.num_dropped: Counter[DropReason] = Counter()
        self._exporter = exporter
        self._max_queue = _from_environment("OTEL_BSP_MAX_QUEUE_SIZE", 2048)
        self._max_batch = _from_environment("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
        self._delay_seconds = _from_environment("OTEL_BSP_SCHEDULE_DELAY", 1000) / 1000
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._exporting = threading.Lock()
        self._counting = threading.Lock()
        self._is_stopped = False
        self._is_given_up = False
        self._away_since: float | None = None
        """When the collector became unavailable, in monotonic time. None if it is available."""
        self._outage = SpanOutage()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a sampled span, or drops it if the queue is full. Never waits."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        num_waiting = len(self._queue)
        if self._is_stopped or num_waiting >= self._max_queue:
            self._drop(1, DropReason.SHUTDOWN if self._is_stopped else DropReason.QUEUE_FULL)
            return
        self._queue.append(span)
        is_due = num_waiting + 1 >= self._max_batch and self._away_since is None
        if is_due and not self._wake.is_set():
            self._wake.set()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
        """Sends the queued spans. Ignores `timeout_millis`, since the exporter limits the time."""
        self._send(1)
        return not self._queue

    def shutdown(self) -> None:
        """Sends the queued spans within LAST_EXPORT_SECONDS and drops the rest."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._wake.set()
        self._thread.join(LAST_EXPORT_SECONDS)
        if self._thread.is_alive():
            self._is_given_up = True
            while rest := self._take():
                self._drop(len(rest), DropReason.SHUTDOWN)
            logger.warning(
                "the collector did not accept the last spans within %g s", LAST_EXPORT_SECONDS
            )
        self._outage.stopped(self.num_dropped)
        # In a thread, since the exporter's shutdown may wait for a running call.
        threading.Thread(target=self._exporter.shutdown, name="last export", daemon=True).start()

    def _run(self) -> None:
        while not self._is_stopped:
            is_full = self._wake.wait(self._delay_seconds)
            self._wake.clear()
            self._send(self._max_batch if is_full and not self._is_stopped else 1)
        self._send(1)

    def _send(self, at_least: int) -> None:
        """Exports while `at_least` spans are queued and the collector is available."""
        with self._exporting:
            while len(self._queue) >= at_least and not self._is_given_up:
                self._export(self._take())
                if self._away_since is not None and not self._is_stopped:
                    return

    def _take(self) -> list[ReadableSpan]:
        batch: list[ReadableSpan] = []
        num_links = 0
        with contextlib.suppress(IndexError):  # shutdown() may empty the queue at the same time
            while len(batch) < self._max_batch and num_links < _MAX_BATCH_LINKS:
                batch.append(span := self._queue.popleft())
                num_links += len(span.links)
        return batch

    def _export(self, batch: list[ReadableSpan]) -> None:
        failure = None
        try:
            self._exporter.export(batch)
            self.num_sent += len(batch)
            self._away_since = None
        except Exception as error:
            failure = str(error)
            if not isinstance(error, NotTaken):
                logger.exception("a defect ended an export of spans to the collector")
            if not (isinstance(error, NotTaken) and error.may_retry):
                self._away_since = None
            elif self._away_since is None:
                self._away_since = time.monotonic()
            self._keep_or_drop(batch)
        if not self._is_stopped:
            is_caught_up = failure is None and len(self._queue) < self._max_batch
            self._outage.exported(self.num_dropped, failure, is_caught_up=is_caught_up)

    def _keep_or_drop(self, batch: list[ReadableSpan]) -> None:
        since = self._away_since
        if self._is_stopped:
            self._drop(len(batch), DropReason.SHUTDOWN)
        elif since is not None and time.monotonic() < since + KEPT_SECONDS:
            self._queue.extendleft(reversed(batch))
        else:
            self._drop(len(batch), DropReason.NOT_TAKEN)

    def _drop(self, num_spans: int, reason: DropReason) -> None:
        with self._counting:
            self.num_dropped[reason] += num_spans


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not text.isdecimal() or not int(text):
        raise SettingError(f"{name} must be a whole number above 0, not {text!r}")
    return int(text)
