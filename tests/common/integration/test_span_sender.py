"""A service is not affected by a collector of spans that is down, slow, full or stopped."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.trace import Link, SpanContext, TraceFlags

from services.common.process.settings import SettingError
from services.common.telemetry import span_sender
from services.common.telemetry.exposition import Exposition
from services.common.telemetry.span_outage import DropReason
from services.common.telemetry.span_sender import SpanSender
from services.common.telemetry.tracing import MAX_LINKS, Tracing, configure_tracing
from services.common.telemetry.tracing_metrics import TracingCollector
from tests.waiting import wait_for

QUEUE, BATCH = 40, 10
DEADLINE_SECONDS = 60.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that accepts spans while `takes` is true, and refuses them otherwise. It answers
    only while the event `goes_on` is set.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self.takes = True
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_asked = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.is_asked.set()
        self.goes_on.wait(DEADLINE_SECONDS)
        if not self.takes:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "full")
        for group in request.resource_spans:
            self.num_taken += sum(len(scope.spans) for scope in group.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self.goes_on.set()
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a short queue of spans, small batches, and a long time limit for exports."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", str(QUEUE))
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", str(BATCH))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(DEADLINE_SECONDS))


def sender_of(tracing: Tracing) -> SpanSender:
    (sender,) = tracing.senders
    return sender


def make_spans(tracing: Tracing, count: int) -> None:
    for _ in range(count):
        tracing.start("span").end()


def num_accounted(sender: SpanSender) -> int:
    return sender.num_sent + sum(sender.num_dropped.values())


def test_all_spans_are_sent_those_before_the_shutdown_included(collector: Collector) -> None:
    tracing = configure_tracing("gateway", collector.endpoint, 1.0)
    make_spans(tracing, 25)
    wait_for(lambda: collector.num_taken == 25)
    wait_for(lambda: sender_of(tracing).num_sent == 25)
    make_spans(tracing, 3)
    tracing.shutdown()
    assert collector.num_taken == 28, "the last ones are sent at the end"
    make_spans(tracing, 2)
    assert sender_of(tracing).num_dropped == {DropReason.SHUTDOWN: 2}


def test_spans_with_many_links_are_sent_in_messages_that_a_collector_takes(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector's limit is 4 MiB. Steps of a large batch of requests have a link to each."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "200")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "200")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setattr(span_sender, "KEPT_SECONDS", 0.1)
    tracing = configure_tracing("scheduler", collector.endpoint, 1.0)
    sender = sender_of(tracing)
    sampled = TraceFlags(TraceFlags.SAMPLED)
    context = SpanContext(1, 1, is_remote=False, trace_flags=sampled)
    links = [Link(context)] * MAX_LINKS
    for _ in range(200):
        tracing.record("step", context, None, 1, 2, attributes={}, links=links)
    wait_for(lambda: num_accounted(sender) == 200)
    tracing.shutdown()
    assert collector.num_taken == 200


def test_while_the_collector_hangs_only_its_spans_are_lost(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.goes_on.clear()
    tracing = configure_tracing("gateway", collector.endpoint, 1.0)
    sender = sender_of(tracing)
    make_spans(tracing, 1)
    assert collector.is_asked.wait(DEADLINE_SECONDS)
    make_spans(tracing, QUEUE + 60)
    assert sender.num_dropped[DropReason.QUEUE_FULL] == 60
    collector.goes_on.set()
    wait_for(lambda: collector.num_taken == 1 + QUEUE)
    make_spans(tracing, 5)
    wait_for(lambda: collector.num_taken == 1 + QUEUE + 5)
    wait_for(lambda: num_accounted(sender) == 1 + QUEUE + 60 + 5)
    tracing.shutdown()
    assert caplog.messages == [
        "spans are dropped: the service produces spans faster than the collector accepts them",
        "the collector accepts spans again: 60 spans were dropped (60 queue_full)",
    ]


def test_a_collector_that_hangs_does_not_delay_the_end(collector: Collector) -> None:
    collector.goes_on.clear()
    tracing = configure_tracing("gateway", collector.endpoint, 1.0)
    make_spans(tracing, 1)
    assert collector.is_asked.wait(DEADLINE_SECONDS)
    make_spans(tracing, 7)
    began = time.monotonic()
    tracing.shutdown()
    assert time.monotonic() - began < 10  # half a second on an idle machine
    wait_for(lambda: sender_of(tracing).num_dropped[DropReason.SHUTDOWN] == 8)


@pytest.mark.parametrize("kind", ["down", "full"])
def test_an_outage_is_logged_once_with_its_cause_and_what_was_dropped(
    kind: str,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, cause = collector.endpoint, "full"
    if kind == "full":
        collector.takes = False
    else:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        cause = f"the collector at {endpoint} cannot be reached"
        # A failed export is repeated for KEPT_SECONDS.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
        monkeypatch.setattr(span_sender, "KEPT_SECONDS", 0.4)
    tracing = configure_tracing("gateway", endpoint, 1.0)
    sender = sender_of(tracing)
    make_spans(tracing, 12)
    wait_for(lambda: sender.num_dropped[DropReason.NOT_TAKEN] == 12)
    make_spans(tracing, 12)
    wait_for(lambda: sender.num_dropped[DropReason.NOT_TAKEN] == 24)
    wait_for(lambda: bool(caplog.messages))
    if kind == "full":
        collector.takes = True
        make_spans(tracing, 4)
        wait_for(lambda: len(caplog.messages) == 2)
    tracing.shutdown()
    counts = "24 spans were dropped (24 not_taken)"
    assert caplog.messages == [
        f"spans are dropped: {cause}",
        f"the collector accepts spans again: {counts}"
        if kind == "full"
        else f"the service stops while the collector does not accept its spans: {counts}",
    ]


STOPPABLE = """
import sys, time
from tests.common.integration.test_span_sender import Collector
print(Collector().endpoint, flush=True)
time.sleep(120)
"""


@contextmanager
def stoppable() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A collector's process and its endpoint. While the process is stopped by a signal, the kernel
    still accepts connections and data for it, but nobody answers.
    """
    arguments = [sys.executable, "-c", STOPPABLE]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    """Stops the process by a signal, and waits until all its threads have stopped."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    stats = [task / "stat" for task in tasks.iterdir()]
    wait_for(lambda: {stat.read_text().rpartition(")")[2].split()[0] for stat in stats} == {"T"})


def test_a_collector_that_is_stopped_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setattr(span_sender, "KEPT_SECONDS", 0.1)
    with stoppable() as (process, endpoint):
        stop(process)
        tracing = configure_tracing("gateway", endpoint, 1.0)
        sender = sender_of(tracing)
        make_spans(tracing, 3)
        wait_for(lambda: sender.num_dropped[DropReason.NOT_TAKEN] == 3)
        make_spans(tracing, 1000)
        began = time.monotonic()
        tracing.shutdown()
        assert time.monotonic() - began < 10  # half a second on an idle machine
        wait_for(lambda: num_accounted(sender) == 1003)


def test_while_a_collector_is_away_for_less_than_a_minute_what_fits_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with stoppable() as (process, endpoint):
        tracing = configure_tracing("gateway", endpoint, 1.0)
        sender = sender_of(tracing)
        make_spans(tracing, 1)
        wait_for(lambda: sender.num_sent == 1)
        stop(process)
        make_spans(tracing, 2 * BATCH + 3)
        time.sleep(1)  # five times the time limit of an export
        assert num_accounted(sender) == 1
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: sender.num_sent == 2 * BATCH + 4)
        tracing.shutdown()
    assert num_accounted(sender) == 2 * BATCH + 4
    assert caplog.messages == []


def test_metrics_count_spans_by_service(collector: Collector) -> None:
    tracing = configure_tracing("kvpool", collector.endpoint, 1.0)
    collector.takes = False
    make_spans(tracing, 2)
    wait_for(lambda: num_accounted(sender_of(tracing)) == 2)
    text = Exposition("kvpool", (), [TracingCollector(tracing)]).render().decode()
    assert 'stepwell_trace_spans_sent_total{service="kvpool"} 0.0' in text
    found = re.findall(r"^stepwell_trace_spans_dropped_total(.*)$", text, re.M)
    assert '{reason="not_taken",service="kvpool"} 2.0' in found
    tracing.shutdown()


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_bound_that_is_none_ends_the_start(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", text)
    with pytest.raises(SettingError, match="OTEL_BSP_MAX_QUEUE_SIZE must be a whole number"):
        configure_tracing("gateway", "http://127.0.0.1:1", 1.0)
