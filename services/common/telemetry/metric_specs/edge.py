"""Metrics of a gateway about clients' requests, tenants and replicas."""

from services.common.telemetry import names
from services.common.telemetry.metric_specs import buckets
from services.common.telemetry.metric_specs.spec import MetricSpec, counter, gauge, histogram

_CLIENTS = (
    counter(
        names.METRIC_HTTP_REQUESTS,
        "requests",
        "Answered HTTP requests by route, method and class of status, such as 2xx.",
        "handler",
        "method",
        "status",
    ),
    histogram(
        names.METRIC_HTTP_REQUEST_SECONDS,
        "seconds",
        "From an HTTP request to the end of its answer, by route and method.",
        buckets.HTTP_SECONDS,
        "handler",
        "method",
    ),
    counter(names.METRIC_HTTP_RESPONSES, "requests", "Answered HTTP requests.", "code"),
    counter(
        names.METRIC_TRACES_KEPT,
        "requests",
        "Traced requests by reason: sampled, failed, slow or watched.",
        "model_name",
        "reason",
    ),
    counter(
        names.METRIC_TRACE_SPANS_CUT,
        "spans",
        "Spans left out of traces, which have at most 1152 here.",
        "model_name",
    ),
    counter(
        names.METRIC_ADMISSION_REJECTIONS,
        "requests",
        "Requests refused before an engine accepted them, by reason.",
        "model_name",
        "reason",
    ),
    counter(
        names.METRIC_GATEWAY_ANSWERS,
        "sequences",
        "Answers that ended, by reason.",
        "model_name",
        "finished_reason",
    ),
    counter(
        names.METRIC_GATEWAY_PROMPT_TOKENS,
        "tokens",
        "Prompt tokens of answered requests, each prompt once.",
        "model_name",
    ),
    counter(
        names.METRIC_GATEWAY_PROMPT_TOKENS_CACHED,
        "tokens",
        "Of the prompt tokens, those found in the prefix cache.",
        "model_name",
    ),
    counter(
        names.METRIC_GATEWAY_GENERATION_TOKENS,
        "tokens",
        "Tokens that clients received.",
        "model_name",
    ),
    histogram(
        names.METRIC_GATEWAY_TIME_TO_FIRST_TOKEN,
        "seconds",
        "From a request's arrival to its first token.",
        buckets.FIRST_TOKEN_SECONDS,
        "model_name",
    ),
    histogram(
        names.METRIC_GATEWAY_INTER_TOKEN_LATENCY,
        "seconds",
        "Between tokens of one answer.",
        buckets.TOKEN_SECONDS,
        "model_name",
    ),
    histogram(
        names.METRIC_GATEWAY_REQUEST_SECONDS,
        "seconds",
        "From a request's arrival to its end.",
        buckets.REQUEST_SECONDS,
        "model_name",
    ),
    gauge(
        names.METRIC_GATEWAY_REQUESTS_IN_FLIGHT,
        "requests",
        "Client requests being served.",
        "model_name",
    ),
    counter(
        names.METRIC_GATEWAY_READERS_CUT,
        "requests",
        "Requests ended because their client stopped reading.",
        "model_name",
        "protocol",
    ),
    histogram(
        names.METRIC_GATEWAY_QUEUE_SECONDS,
        "seconds",
        "Waits of sequences for a slot at a replica, by reason.",
        buckets.FIRST_TOKEN_SECONDS,
        "model_name",
        "reason",
    ),
)

_REPLICAS = (
    gauge(names.METRIC_GATEWAY_REPLICAS, "replicas", "Replicas that are known.", "model_name"),
    gauge(
        names.METRIC_GATEWAY_REPLICAS_READY,
        "replicas",
        "Replicas that accept requests.",
        "model_name",
    ),
    gauge(
        names.METRIC_GATEWAY_REPLICAS_EXPECTED,
        "replicas",
        "Replicas that should be ready; 0 if no number is set.",
        "model_name",
    ),
    gauge(
        names.METRIC_GATEWAY_REPLICAS_SILENT,
        "replicas",
        "Replicas whose scheduler did not send metrics.",
        "model_name",
    ),
    counter(
        names.METRIC_GATEWAY_RESUBMISSIONS,
        "sequences",
        "Sequences sent again with their tokens: the replica was lost, could not run "
        "steps, or refused them, or another tenant got their slot.",
        "model_name",
    ),
    gauge(
        names.METRIC_DISCOVERY_UP,
        "",
        "1 if a source finds schedulers, by its last answer.",
        "source",
    ),
    gauge(
        names.METRIC_DISCOVERY_ADDRESSES,
        "addresses",
        "Addresses of schedulers in a source's last answer.",
        "source",
    ),
    counter(names.METRIC_DISCOVERY_FAILURES, "looks", "Failed queries for schedulers.", "source"),
)

INDEX_SPECS: tuple[MetricSpec, ...] = (
    gauge(
        names.METRIC_INDEX_STATE,
        "",
        "1 for the state of the index of cached prefixes, else 0.",
        "state",
    ),
    gauge(names.METRIC_INDEX_NODE_STATE, "", "The same of each node.", "node", "state"),
    gauge(names.METRIC_INDEX_KEYS, "blocks", "Blocks in the index."),
    counter(names.METRIC_INDEX_ENTRIES, "entries", "Entries of the log that were applied."),
    counter(names.METRIC_INDEX_DAMAGED, "values", "Values that could not be read."),
    counter(names.METRIC_INDEX_GAPS, "gaps", "Times that entries were missing."),
    counter(names.METRIC_INDEX_DRIFTS, "digests", "Times that a digest differed."),
    counter(names.METRIC_INDEX_LOADS, "snapshots", "Snapshots that were loaded."),
    counter(names.METRIC_INDEX_FAILURES, "calls", "Calls or streams that failed."),
)
"""Metrics of the index of cached prefixes."""

SPECS: tuple[MetricSpec, ...] = (*_CLIENTS, *_REPLICAS)
