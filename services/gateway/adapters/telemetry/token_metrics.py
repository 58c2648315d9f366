"""Prometheus metrics that are updated for each token."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry import names
from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import histogram_family, value_family


class TokenMetrics(Collector):
    """Generated tokens and inter-token latencies as plain numbers, read at each scrape. A counter
    of the client library would take a lock for each token.
    """

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._num_generated = 0
        self._latency = Histogram(names.METRIC_GATEWAY_INTER_TOKEN_LATENCY)

    def came(self, num_tokens: int, seconds: float | None) -> None:
        """Counts tokens of an answer. `seconds` is the time since the answer's previous tokens;
        None for the answer's first tokens.
        """
        self._num_generated += num_tokens
        if seconds is not None:
            self._latency.observe(seconds / num_tokens, num_tokens)

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        generated = value_family(names.METRIC_GATEWAY_GENERATION_TOKENS)
        generated.add_metric([self._model], self._num_generated)
        yield generated
        latency = histogram_family(names.METRIC_GATEWAY_INTER_TOKEN_LATENCY)
        self._latency.add_to(latency, [self._model])
        yield latency
