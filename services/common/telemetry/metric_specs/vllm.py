"""Metrics of a replica with vLLM's names, labels and meanings."""

from services.common.telemetry.metric_specs import buckets
from services.common.telemetry.metric_specs.spec import Source, Specs

_scheduler = Specs(Source.SCHEDULER)
NUM_REQUESTS_RUNNING = _scheduler.gauge(
    "vllm:num_requests_running", "requests", "Requests that are running."
)
NUM_REQUESTS_WAITING = _scheduler.gauge(
    "vllm:num_requests_waiting",
    "requests",
    "Requests that are waiting: not scheduled yet, or preempted.",
)
NUM_REQUESTS_WAITING_BY_REASON = _scheduler.gauge(
    "vllm:num_requests_waiting_by_reason",
    "requests",
    "Waiting requests by reason. capacity: budget, rows or blocks; deferred: anything else.",
    "reason",
)
KV_CACHE_USAGE = _scheduler.gauge(
    "vllm:kv_cache_usage_perc", "ratio", "Share of the KV cache in use; 1 is all of it."
)
CACHE_CONFIG = _scheduler.gauge(
    "vllm:cache_config_info",
    "",
    "Always 1; the labels have the shape of the KV cache, the null block included.",
    "block_size",
    "num_gpu_blocks",
    "cache_dtype",
    "enable_prefix_caching",
)
LORA_REQUESTS = _scheduler.gauge(
    "vllm:lora_requests_info",
    "",
    "Time of the reading, in seconds since the epoch; the labels name the adapters of requests.",
    "max_lora",
    "waiting_lora_adapters",
    "running_lora_adapters",
)
EXTERNAL_PREFIX_CACHE_QUERIES = _scheduler.counter(
    "vllm:external_prefix_cache_queries",
    "tokens",
    "Tokens of admitted requests after their local hits, which the connector looked up.",
)
EXTERNAL_PREFIX_CACHE_HITS = _scheduler.counter(
    "vllm:external_prefix_cache_hits",
    "tokens",
    "Tokens whose keys and values the connector loaded.",
)
NUM_PREEMPTIONS = _scheduler.counter(
    "vllm:num_preemptions",
    "preemptions",
    "Running requests that lost their blocks: to another request, by a lost pool or "
    "worker, or by an operator.",
)
CORRUPTED_REQUESTS = _scheduler.counter(
    "vllm:corrupted_requests",
    "requests",
    "Requests that ended because the model's logits held NaN.",
)

PROMPT_TOKENS = _scheduler.counter(
    "vllm:prompt_tokens",
    "tokens",
    "Prompt tokens of requests that have a first token, each request once.",
)
PROMPT_TOKENS_CACHED = _scheduler.counter(
    "vllm:prompt_tokens_cached",
    "tokens",
    "Prompt tokens of requests with a first token that were found in the prefix cache.",
)
PROMPT_TOKENS_BY_SOURCE = _scheduler.counter(
    "vllm:prompt_tokens_by_source",
    "tokens",
    "Prompt tokens by source of keys and values: local_compute, local_cache_hit or "
    "external_kv_transfer.",
    "source",
)
GENERATION_TOKENS = _scheduler.counter("vllm:generation_tokens", "tokens", "Tokens generated.")
ITERATION_TOKENS = _scheduler.histogram(
    "vllm:iteration_tokens_total", "tokens", "Tokens computed in a step.", buckets.ITERATION_TOKENS
)

REQUEST_SUCCESS = _scheduler.counter(
    "vllm:request_success",
    "requests",
    "Sequences that ended, by vLLM's reasons. Refused ones are not among them.",
    "finished_reason",
)
TIME_TO_FIRST_TOKEN = _scheduler.histogram(
    "vllm:time_to_first_token_seconds",
    "seconds",
    "Time from a request's arrival at the gateway to its first token.",
    buckets.FIRST_TOKEN_SECONDS,
)
INTER_TOKEN_LATENCY = _scheduler.histogram(
    "vllm:inter_token_latency_seconds",
    "seconds",
    "Time between two tokens of one sequence.",
    buckets.TOKEN_SECONDS,
)
REQUEST_TIME_PER_OUTPUT_TOKEN = _scheduler.histogram(
    "vllm:request_time_per_output_token_seconds",
    "seconds",
    "Decode time of a sequence by its tokens after the first; none for one of a single token.",
    buckets.TOKEN_SECONDS,
)
E2E_REQUEST_LATENCY = _scheduler.histogram(
    "vllm:e2e_request_latency_seconds",
    "seconds",
    "Time from a request's arrival at the gateway to its end.",
    buckets.REQUEST_SECONDS,
)
REQUEST_QUEUE_TIME = _scheduler.histogram(
    "vllm:request_queue_time_seconds",
    "seconds",
    "Time from a sequence's arrival at the scheduler until it was scheduled first.",
    buckets.REQUEST_SECONDS,
)
REQUEST_PREFILL_TIME = _scheduler.histogram(
    "vllm:request_prefill_time_seconds",
    "seconds",
    "Time from the first scheduling to the first token, waits after preemptions included.",
    buckets.REQUEST_SECONDS,
)
REQUEST_DECODE_TIME = _scheduler.histogram(
    "vllm:request_decode_time_seconds",
    "seconds",
    "Time from a sequence's first token to its last, waits after preemptions included.",
    buckets.REQUEST_SECONDS,
)
REQUEST_INFERENCE_TIME = _scheduler.histogram(
    "vllm:request_inference_time_seconds",
    "seconds",
    "Time from a sequence's first scheduling to its last token.",
    buckets.REQUEST_SECONDS,
)
REQUEST_PROMPT_TOKENS = _scheduler.histogram(
    "vllm:request_prompt_tokens",
    "tokens",
    "Prompt tokens of a sequence that ended.",
    buckets.REQUEST_TOKENS,
)
REQUEST_GENERATION_TOKENS = _scheduler.histogram(
    "vllm:request_generation_tokens",
    "tokens",
    "Tokens that a sequence that ended had generated here.",
    buckets.REQUEST_TOKENS,
)
REQUEST_MAX_NUM_GENERATION_TOKENS = _scheduler.histogram(
    "vllm:request_max_num_generation_tokens",
    "tokens",
    "Tokens that each ended sequence had generated here; vLLM counts only the longest of n.",
    buckets.REQUEST_TOKENS,
)
REQUEST_PREFILL_KV_COMPUTED_TOKENS = _scheduler.histogram(
    "vllm:request_prefill_kv_computed_tokens",
    "tokens",
    "Prompt tokens of a sequence that were not found in the prefix cache.",
    buckets.REQUEST_TOKENS,
)
REQUEST_PARAMS_N = _scheduler.histogram(
    "vllm:request_params_n", "sequences", "The parameter n of requests.", buckets.CHOICES
)
REQUEST_PARAMS_MAX_TOKENS = _scheduler.histogram(
    "vllm:request_params_max_tokens",
    "tokens",
    "The parameter max_tokens of sequences that ended; without it, the rest of the model's length.",
    buckets.REQUEST_TOKENS,
)

SPEC_DECODE_DRAFTS = _scheduler.counter(
    "vllm:spec_decode_num_drafts",
    "verifications",
    "Times that a step verified drafts of a request.",
)
SPEC_DECODE_DRAFT_TOKENS = _scheduler.counter(
    "vllm:spec_decode_num_draft_tokens", "tokens", "Drafts that were verified."
)
SPEC_DECODE_ACCEPTED_TOKENS = _scheduler.counter(
    "vllm:spec_decode_num_accepted_tokens", "tokens", "Drafts that equal the sampled tokens."
)
SPEC_DECODE_ACCEPTED_TOKENS_PER_POS = _scheduler.counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "tokens",
    "Drafts that equal the sampled tokens, by position in a verification, from 0.",
    "position",
)

_pool = Specs(Source.KVPOOL)
PREFIX_CACHE_QUERIES = _pool.counter(
    "vllm:prefix_cache_queries",
    "tokens",
    "Prompt tokens looked up by admissions, except after a preemption.",
    "engine",
)
PREFIX_CACHE_HITS = _pool.counter(
    "vllm:prefix_cache_hits",
    "tokens",
    "Prompt tokens found by admissions, except after a preemption.",
    "engine",
)

SPECS = [*_scheduler.all, *_pool.all]
