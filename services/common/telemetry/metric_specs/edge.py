"""Metrics of a gateway about clients' requests, tenants and replicas."""

from services.common.telemetry.metric_specs import buckets
from services.common.telemetry.metric_specs.spec import Source, Specs

_specs = Specs(Source.GATEWAY)
# The `http_*` metrics have the names of vLLM's HTTP metrics.
HTTP_REQUESTS = _specs.counter(
    "http_requests",
    "requests",
    "Answered HTTP requests by route, method and class of status, such as 2xx.",
    "handler",
    "method",
    "status",
)
HTTP_REQUEST_SECONDS = _specs.histogram(
    "http_request_duration_seconds",
    "seconds",
    "From an HTTP request to the end of its answer, by route and method.",
    buckets.HTTP_SECONDS,
    "handler",
    "method",
)
HTTP_RESPONSES = _specs.counter(
    "stepwell_gateway_http_responses", "requests", "Answered HTTP requests.", "code"
)
TRACES_KEPT = _specs.counter(
    "stepwell_traces_kept",
    "requests",
    "Traced requests by reason: sampled, failed, slow or watched.",
    "model_name",
    "reason",
)
TRACE_SPANS_CUT = _specs.counter(
    "stepwell_trace_spans_cut",
    "spans",
    "Spans left out of traces, which have at most 1152 here.",
    "model_name",
)
ADMISSION_REJECTIONS = _specs.counter(
    "vllm:admission_rejections",
    "requests",
    "Requests refused before an engine accepted them, by reason.",
    "model_name",
    "reason",
)
GATEWAY_ANSWERS = _specs.counter(
    "stepwell_gateway_answers",
    "sequences",
    "Answers that ended, by reason.",
    "model_name",
    "finished_reason",
)
GATEWAY_PROMPT_TOKENS = _specs.counter(
    "stepwell_gateway_prompt_tokens",
    "tokens",
    "Prompt tokens of answered requests, each prompt once.",
    "model_name",
)
GATEWAY_PROMPT_TOKENS_CACHED = _specs.counter(
    "stepwell_gateway_prompt_tokens_cached",
    "tokens",
    "Of the prompt tokens, those found in the prefix cache.",
    "model_name",
)
GATEWAY_GENERATION_TOKENS = _specs.counter(
    "stepwell_gateway_generation_tokens", "tokens", "Tokens that clients received.", "model_name"
)
GATEWAY_TIME_TO_FIRST_TOKEN = _specs.histogram(
    "stepwell_gateway_time_to_first_token_seconds",
    "seconds",
    "From a request's arrival to its first token.",
    buckets.FIRST_TOKEN_SECONDS,
    "model_name",
)
GATEWAY_INTER_TOKEN_LATENCY = _specs.histogram(
    "stepwell_gateway_inter_token_latency_seconds",
    "seconds",
    "Between tokens of one answer.",
    buckets.TOKEN_SECONDS,
    "model_name",
)
GATEWAY_REQUEST_SECONDS = _specs.histogram(
    "stepwell_gateway_request_seconds",
    "seconds",
    "From a request's arrival to its end.",
    buckets.REQUEST_SECONDS,
    "model_name",
)
GATEWAY_REQUESTS_IN_FLIGHT = _specs.gauge(
    "stepwell_gateway_requests_in_flight", "requests", "Client requests being served.", "model_name"
)
GATEWAY_READERS_CUT = _specs.counter(
    "stepwell_gateway_readers_cut",
    "requests",
    "Requests ended because their client stopped reading.",
    "model_name",
    "protocol",
)
GATEWAY_QUEUE_SECONDS = _specs.histogram(
    "stepwell_gateway_queue_seconds",
    "seconds",
    "Waits of sequences for a slot at a replica, by reason.",
    buckets.FIRST_TOKEN_SECONDS,
    "model_name",
    "reason",
)

GATEWAY_REPLICAS = _specs.gauge(
    "stepwell_gateway_replicas", "replicas", "Replicas that are known.", "model_name"
)
GATEWAY_REPLICAS_READY = _specs.gauge(
    "stepwell_gateway_replicas_ready", "replicas", "Replicas that accept requests.", "model_name"
)
GATEWAY_REPLICAS_EXPECTED = _specs.gauge(
    "stepwell_gateway_replicas_expected",
    "replicas",
    "Replicas that should be ready; 0 if no number is set.",
    "model_name",
)
GATEWAY_REPLICAS_SILENT = _specs.gauge(
    "stepwell_gateway_replicas_without_metrics",
    "replicas",
    "Replicas whose scheduler did not send metrics.",
    "model_name",
)
GATEWAY_RESUBMISSIONS = _specs.counter(
    "stepwell_gateway_resubmissions",
    "sequences",
    "Sequences sent again with their tokens: the replica was lost, could not run "
    "steps, or refused them, or another tenant got their slot.",
    "model_name",
)
DISCOVERY_UP = _specs.gauge(
    "stepwell_discovery_up", "", "1 if a source finds schedulers, by its last answer.", "source"
)
DISCOVERY_ADDRESSES = _specs.gauge(
    "stepwell_discovery_addresses",
    "addresses",
    "Addresses of schedulers in a source's last answer.",
    "source",
)
DISCOVERY_FAILURES = _specs.counter(
    "stepwell_discovery_failures", "looks", "Failed queries for schedulers.", "source"
)

_index = Specs(Source.GATEWAY)
INDEX_STATE = _index.gauge(
    "stepwell_prefix_index_state",
    "",
    "1 for the state of the index of cached prefixes, else 0.",
    "state",
)
INDEX_NODE_STATE = _index.gauge(
    "stepwell_prefix_index_node_state", "", "The same of each node.", "node", "state"
)
INDEX_KEYS = _index.gauge("stepwell_prefix_index_keys", "blocks", "Blocks in the index.")
INDEX_ENTRIES = _index.counter(
    "stepwell_prefix_index_entries", "entries", "Entries of the log that were applied."
)
INDEX_DAMAGED = _index.counter(
    "stepwell_prefix_index_damaged_entries", "values", "Values that could not be read."
)
INDEX_GAPS = _index.counter(
    "stepwell_prefix_index_gaps", "gaps", "Times that entries were missing."
)
INDEX_DRIFTS = _index.counter(
    "stepwell_prefix_index_drifts", "digests", "Times that a digest differed."
)
INDEX_LOADS = _index.counter(
    "stepwell_prefix_index_loads", "snapshots", "Snapshots that were loaded."
)
INDEX_FAILURES = _index.counter(
    "stepwell_prefix_index_failures", "calls", "Calls or streams that failed."
)

INDEX_SPECS = _index.all
"""Metrics of the gateway's index of cached prefixes."""
SPECS = _specs.all
