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
    "Time from an HTTP request's arrival to the end of its answer, by route and method.",
    buckets.HTTP_SECONDS,
    "handler",
    "method",
)
HTTP_RESPONSES = _specs.counter(
    "stepwell_gateway_http_responses",
    "requests",
    "Answered HTTP requests, over all routes.",
    "code",
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
    "Spans that were omitted because a trace of the gateway has at most 1152 spans.",
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
    "Prompt tokens of answered requests that were found in the prefix cache.",
    "model_name",
)
GATEWAY_GENERATION_TOKENS = _specs.counter(
    "stepwell_gateway_generation_tokens", "tokens", "Tokens that clients received.", "model_name"
)
GATEWAY_TIME_TO_FIRST_TOKEN = _specs.histogram(
    "stepwell_gateway_time_to_first_token_seconds",
    "seconds",
    "Time from a request's arrival to its first token.",
    buckets.FIRST_TOKEN_SECONDS,
    "model_name",
)
GATEWAY_INTER_TOKEN_LATENCY = _specs.histogram(
    "stepwell_gateway_inter_token_latency_seconds",
    "seconds",
    "Time between two tokens of one answer.",
    buckets.TOKEN_SECONDS,
    "model_name",
)
GATEWAY_REQUEST_SECONDS = _specs.histogram(
    "stepwell_gateway_request_seconds",
    "seconds",
    "Time from a request's arrival to the end of its answer.",
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
    "Replicas that should be ready, by --expected-replicas.",
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
    "Sequences that were sent again with their tokens because the replica was lost, could not run "
    "steps or refused them, or because another tenant got their slot.",
    "model_name",
)
DISCOVERY_UP = _specs.gauge(
    "stepwell_discovery_up",
    "",
    "1 if the last query of a source of schedulers' addresses succeeded, else 0.",
    "source",
)
DISCOVERY_ADDRESSES = _specs.gauge(
    "stepwell_discovery_addresses",
    "addresses",
    "Addresses of schedulers that a source returned last.",
    "source",
)
DISCOVERY_FAILURES = _specs.counter(
    "stepwell_discovery_failures",
    "looks",
    "Failed queries of a source of schedulers' addresses.",
    "source",
)

_index = Specs(Source.GATEWAY)
INDEX_STATE = _index.gauge(
    "stepwell_prefix_index_state",
    "",
    "1 for the state of the index of cached prefixes, else 0.",
    "state",
)
INDEX_NODE_STATE = _index.gauge(
    "stepwell_prefix_index_node_state",
    "",
    "1 for the state of the index of a pool's cached prefixes, else 0.",
    "node",
    "state",
)
INDEX_KEYS = _index.gauge(
    "stepwell_prefix_index_keys", "blocks", "Blocks in the gateway's index of cached prefixes."
)
INDEX_ENTRIES = _index.counter(
    "stepwell_prefix_index_entries",
    "entries",
    "Entries of the log in Redis that the index applied.",
)
INDEX_DAMAGED = _index.counter(
    "stepwell_prefix_index_damaged_entries", "values", "Damaged values in Redis or from a pool."
)
INDEX_GAPS = _index.counter(
    "stepwell_prefix_index_gaps", "gaps", "Gaps in the log: entries were missing."
)
INDEX_DRIFTS = _index.counter(
    "stepwell_prefix_index_drifts",
    "digests",
    "Times that the digest of a pool's index differed from the pool's own digest.",
)
INDEX_LOADS = _index.counter(
    "stepwell_prefix_index_loads", "snapshots", "Snapshots of pools that the index loaded."
)
INDEX_FAILURES = _index.counter(
    "stepwell_prefix_index_failures", "calls", "Calls to Redis or streams from pools that failed."
)

INDEX_SPECS = _index.all
"""Metrics of the gateway's index of cached prefixes."""
SPECS = _specs.all
