"""Prometheus metrics of requests with an idempotency key."""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.telemetry.metric_specs import by_label, single
from services.common.telemetry.metric_specs.spec import Source, Specs
from services.gateway.options.idempotency.core.keyed_requests import KeyedRequests
from services.gateway.options.idempotency.core.sharing import Sharing

_specs = Specs(Source.GATEWAY)
REQUESTS = _specs.counter(
    "stepwell_idempotent_requests",
    "requests",
    "Requests with an idempotency key, by outcome.",
    "outcome",
)
ANSWERS = _specs.gauge(
    "stepwell_idempotent_answers",
    "answers",
    "Answers with an idempotency key that the gateway keeps.",
)
BYTES = _specs.gauge(
    "stepwell_idempotent_answer_bytes", "bytes", "Bytes of kept answers that have ended."
)
SUSPENDED = _specs.counter(
    "stepwell_idempotent_answers_suspended",
    "answers",
    "Answers whose generation stopped because no client read them.",
)
EVICTED = _specs.counter(
    "stepwell_idempotent_answers_evicted",
    "answers",
    "Answers evicted because idempotency_max_bytes was reached.",
)
SHARED = _specs.gauge(
    "stepwell_idempotent_sharing",
    "",
    "1 while this gateway shares its answers with other gateways through Redis, else 0.",
)
ENTRIES = _specs.counter(
    "stepwell_idempotent_log_entries",
    "entries",
    "Entries of answers' logs that were written to Redis.",
)
ALONE = _specs.counter(
    "stepwell_idempotent_answers_alone",
    "answers",
    "Answers that were not shared with other gateways because Redis could not be used.",
)
FENCED = _specs.counter(
    "stepwell_idempotent_answers_fenced",
    "answers",
    "Answers of this gateway that another gateway continues.",
)
LOST = _specs.counter(
    "stepwell_idempotent_logs_lost",
    "logs",
    "Answers' logs that Redis had lost and that were written again.",
)
DAMAGED = _specs.counter(
    "stepwell_idempotent_logs_damaged", "logs", "Answers' logs in Redis that were damaged."
)
FAILURES = _specs.counter(
    "stepwell_idempotent_sharing_failures", "calls", "Calls to Redis for answers' logs that failed."
)
SPECS = _specs.all


class KeyedCollector(Collector):
    """Makes the metrics from the counts at each scrape."""

    def __init__(self, keyed_requests: KeyedRequests) -> None:
        self._keyed = keyed_requests

    def collect(self) -> Iterator[Metric]:
        """Yields each metric. If gateways do not share answers through logs, the metrics of logs
        are omitted.
        """
        counts = self._keyed.counts
        outcomes = ("begun", "attached", "followed", "resumed", "refused")
        yield by_label(REQUESTS, {outcome: getattr(counts, outcome) for outcome in outcomes})
        yield single(ANSWERS, len(self._keyed))
        yield single(BYTES, self._keyed.num_bytes)
        yield single(SUSPENDED, counts.suspended)
        yield single(EVICTED, counts.evicted)
        if self._keyed.sharing is not None:
            yield from _of_logs(self._keyed.sharing)


def _of_logs(sharing: Sharing) -> Iterator[Metric]:
    counts = sharing.counts
    yield single(SHARED, sharing.is_reachable)
    yield single(ENTRIES, counts.entries)
    yield single(ALONE, counts.alone)
    yield single(FENCED, counts.fenced)
    yield single(LOST, counts.lost)
    yield single(DAMAGED, counts.damaged)
    yield single(FAILURES, counts.failures)
