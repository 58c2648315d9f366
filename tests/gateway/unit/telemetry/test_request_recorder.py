"""The decision at the end of a request whether it is traced."""

import time
from collections import Counter

import pytest

from services.common.telemetry import names
from services.gateway.adapters.telemetry.metrics import Metrics
from services.gateway.adapters.telemetry.request_record import Call
from services.gateway.adapters.telemetry.request_recorder import (
    MAX_PER_MINUTE,
    RecorderSettings,
    RequestRecorder,
)
from tests.gateway.spans import Tracer

CALL = Call("http", "POST", "/v1/completions", "127.0.0.1")
SAMPLED = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def reasons(tracer: Tracer) -> Counter[object]:
    roots = (span for span in tracer.spans if span.kind.name == "SERVER")
    return Counter((span.attributes or {})[names.ATTR_KEPT_FOR] for span in roots)


@pytest.mark.parametrize(("slow_seconds", "reason"), [(0.0, "slowest"), (1.0, "slow")])
def test_a_growing_queue_is_not_traced_whole(slow_seconds: float, reason: str) -> None:
    """In a growing queue, each request takes longer than all requests before it."""
    tracer = Tracer(0.0)
    settings = RecorderSettings("tiny", slow_seconds, num_slowest=3, access_log=False)
    recorder = RequestRecorder(settings, tracer.tracing, Metrics("tiny"), lambda *_: None, {})

    def serve(nanos: int, headers: dict[str, str]) -> None:
        arrived = time.perf_counter_ns() - nanos
        recorder.end(recorder.begin(CALL, "text_completion", headers, arrived))

    for number in range(100):
        serve(2_000_000_000 + 1_000_000_000 * number, {})
    assert MAX_PER_MINUTE <= reasons(tracer)[reason] < MAX_PER_MINUTE + 10
    # Requests that were sampled at their start do not count towards the limit.
    before = reasons(tracer)[reason]
    for number in range(100, 200):
        serve(2_000_000_000 + 1_000_000_000 * number, SAMPLED)
    assert reasons(tracer).total() == before + 100
