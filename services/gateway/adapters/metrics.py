"""Prometheus metrics at the edge, under vLLM's names."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from services.common import names

_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0, 20.0,
)  # fmt: skip
_E2E_BUCKETS = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class Metrics:
    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self._success = self._counter(
            names.METRIC_REQUEST_SUCCESS, "Sequences that ended, by reason.", "finished_reason"
        )
        self._rejections = self._counter(
            names.METRIC_ADMISSION_REJECTIONS,
            "Requests refused before an engine took them, by reason; counted nowhere else.",
            "reason",
        )
        model = {"model_name": model_name}
        self.prompt_tokens = self._counter(
            names.METRIC_PROMPT_TOKENS, "Prompt tokens of requests that were answered."
        ).labels(**model)
        self.cached_tokens = self._counter(
            names.METRIC_PROMPT_TOKENS_CACHED, "Of the prompt tokens, found in the prefix cache."
        ).labels(**model)
        self.generation_tokens = self._counter(
            names.METRIC_GENERATION_TOKENS, "Tokens generated."
        ).labels(**model)
        self.time_to_first_token = self._histogram(
            names.METRIC_TIME_TO_FIRST_TOKEN, "From arrival to the first token.", _TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            names.METRIC_INTER_TOKEN_LATENCY, "Between tokens of one answer.", _ITL_BUCKETS
        )
        self.e2e_latency = self._histogram(
            names.METRIC_E2E_REQUEST_LATENCY, "From arrival to the end.", _E2E_BUCKETS
        )
        self._readers_cut = self._counter(
            names.METRIC_GATEWAY_READERS_CUT,
            "Requests ended since their client had stopped reading.",
            "protocol",
        )
        self.requests_in_flight = self._gauge(
            names.METRIC_GATEWAY_REQUESTS_IN_FLIGHT, "Client requests being served."
        )
        self.replicas_ready = self._gauge(
            names.METRIC_GATEWAY_REPLICAS_READY, "Replicas that take requests."
        )

    def ended(self, reason: str) -> None:
        self._success.labels(model_name=self._model, finished_reason=reason).inc()

    def refused(self, reason: str) -> None:
        """A request was refused, or failed before an engine took it. No other metric counts it."""
        self._rejections.labels(model_name=self._model, reason=reason).inc()

    def reader_timed_out(self, protocol: str) -> None:
        self._readers_cut.labels(model_name=self._model, protocol=protocol).inc()

    def register(self, collector: Collector) -> None:
        """Adds metrics that are read at each scrape."""
        self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(name, doc, ["model_name", *labels], registry=self._registry)

    def _gauge(self, name: str, doc: str) -> Gauge:
        gauge = Gauge(name, doc, ["model_name"], registry=self._registry)
        return gauge.labels(model_name=self._model)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, doc, ["model_name"], buckets=buckets, registry=self._registry)
        return histogram.labels(model_name=self._model)
