"""Prometheus metrics of requests as clients experience them."""

from collections.abc import Iterator
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import edge, single
from services.common.telemetry.metric_specs.spec import MetricSpec
from services.gateway.adapters.telemetry.request_record import KeptFor


class Metrics:
    """The counters, gauges and histograms of a gateway, in their own registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._answers = self._counter(edge.GATEWAY_ANSWERS)
        self._rejections = self._counter(edge.ADMISSION_REJECTIONS)
        self.prompt_tokens = self._of_model(self._counter(edge.GATEWAY_PROMPT_TOKENS))
        self.cached_tokens = self._of_model(self._counter(edge.GATEWAY_PROMPT_TOKENS_CACHED))
        self.tokens = TokenMetrics(model_name)
        self.registry.register(self.tokens)
        self.time_to_first_token = self._histogram(edge.GATEWAY_TIME_TO_FIRST_TOKEN)
        self.request_seconds = self._histogram(edge.GATEWAY_REQUEST_SECONDS)
        self._queue_seconds = self._histograms(edge.GATEWAY_QUEUE_SECONDS)
        self._readers_cut = self._counter(edge.GATEWAY_READERS_CUT)
        self.requests_in_flight = self._gauge(edge.GATEWAY_REQUESTS_IN_FLIGHT)
        self._http_requests = self._counter(edge.HTTP_REQUESTS)
        self._http_seconds = self._histograms(edge.HTTP_REQUEST_SECONDS)
        self._http_responses = self._counter(edge.HTTP_RESPONSES)
        self._traces_kept = self._counter(edge.TRACES_KEPT)
        for reason in KeptFor:
            self._traces_kept.labels(model_name, reason.value)
        self._spans_cut = self._of_model(self._counter(edge.TRACE_SPANS_CUT))
        # Looking up a series by its labels costs more than counting, so frequently used series are
        # cached.
        self._http_series = cache(self._find_http_series)
        self._rejections_for = cache(partial(self._rejections.labels, model_name))
        self._answers_for = cache(partial(self._answers.labels, model_name))

    def ended(self, reason: str) -> None:
        self._answers_for(reason).inc()

    def refused(self, reason: str) -> None:
        """Counts a request that was refused, or failed before a replica scheduled it. Of this
        class's metrics only this one counts the request.
        """
        self._rejections_for(reason).inc()

    def waited(self, reason: str, seconds: float) -> None:
        self._queue_seconds.labels(self._model, reason).observe(seconds)

    def reader_timed_out(self, protocol: str) -> None:
        self._readers_cut.labels(self._model, protocol).inc()

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts an HTTP response. `handler` is the route."""
        requests, times, responses = self._http_series(handler, method, status)
        requests.inc()
        times.observe(seconds)
        responses.inc()

    def _find_http_series(
        self, handler: str, method: str, status: int
    ) -> tuple[Counter, ClientHistogram, Counter]:
        return (
            self._http_requests.labels(handler, method, f"{status // 100}xx"),
            self._http_seconds.labels(handler, method),
            self._http_responses.labels(str(status)),
        )

    def trace_kept(self, reason: KeptFor) -> None:
        self._traces_kept.labels(self._model, reason.value).inc()

    def trace_cut(self, num_spans: int) -> None:
        self._spans_cut.inc(num_spans)

    def _counter(self, spec: MetricSpec) -> Counter:
        return Counter(spec.name, spec.text, spec.labels, registry=self.registry)

    def _of_model(self, counter: Counter) -> Counter:
        return counter.labels(self._model)

    def _gauge(self, spec: MetricSpec) -> Gauge:
        return Gauge(spec.name, spec.text, spec.labels, registry=self.registry).labels(self._model)

    def _histogram(self, spec: MetricSpec) -> ClientHistogram:
        return self._histograms(spec).labels(self._model)

    def _histograms(self, spec: MetricSpec) -> ClientHistogram:
        return ClientHistogram(
            spec.name, spec.text, spec.labels, buckets=spec.buckets, registry=self.registry
        )


class TokenMetrics(Collector):
    """Generated tokens and inter-token latencies. They are counted in plain numbers, which are read
    at each scrape, because a counter of prometheus_client would take a lock for each token.
    """

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._num_generated = 0
        self._latency = Histogram(edge.GATEWAY_INTER_TOKEN_LATENCY)

    def came(self, num_tokens: int, seconds: float | None) -> None:
        """Counts tokens of an answer. `seconds` is the time since the answer's previous tokens. It
        is None for the answer's first tokens.
        """
        self._num_generated += num_tokens
        if seconds is not None:
            self._latency.observe(seconds / num_tokens, num_tokens)

    def collect(self) -> Iterator[Metric]:
        yield single(edge.GATEWAY_GENERATION_TOKENS, self._num_generated, self._model)
        yield self._latency.metric(self._model)
