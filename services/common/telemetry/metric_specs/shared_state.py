"""Metrics of the index of cached prefixes and of answers to keyed requests, which gateways
share.
"""

from services.common.telemetry import names
from services.common.telemetry.metric_specs.spec import MetricSpec, counter, gauge

_INDEX = (
    gauge(
        names.METRIC_INDEX_STATE,
        "",
        "How far the index of cached prefixes can be relied on: the state that it is in is 1.",
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

_KEYED = (
    counter(
        names.METRIC_KEYED_REQUESTS,
        "requests",
        "Requests with an idempotency key, by what they met.",
        "outcome",
    ),
    gauge(names.METRIC_KEYED_ANSWERS, "answers", "Answers that are remembered."),
    gauge(names.METRIC_KEYED_BYTES, "bytes", "What those take that ended."),
    counter(names.METRIC_KEYED_SUSPENDED, "answers", "Answers that no client read."),
    counter(names.METRIC_KEYED_EVICTED, "answers", "Answers forgotten for want of room."),
    gauge(
        names.METRIC_KEYED_SHARED,
        "",
        "1 while other gateways can find the answers of this one; with Redis alone.",
    ),
    counter(names.METRIC_KEYED_ENTRIES, "entries", "Entries that were written."),
    counter(names.METRIC_KEYED_ALONE, "answers", "Answers that stay at this gateway."),
    counter(names.METRIC_KEYED_FENCED, "answers", "Answers that another gateway took over."),
    counter(names.METRIC_KEYED_LOST, "logs", "Logs that were gone and written again."),
    counter(names.METRIC_KEYED_DAMAGED, "logs", "Logs that could not be read."),
    counter(names.METRIC_KEYED_FAILURES, "calls", "Calls of Redis that failed."),
)

SPECS: tuple[MetricSpec, ...] = (*_INDEX, *_KEYED)
