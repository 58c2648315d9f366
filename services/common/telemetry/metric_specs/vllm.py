"""Metrics of a replica under vLLM's names, with its labels and meaning."""

from dataclasses import replace

from services.common.telemetry import names
from services.common.telemetry.metric_specs import buckets
from services.common.telemetry.metric_specs.spec import (
    MetricSpec,
    Source,
    counter,
    gauge,
    histogram,
)

_STATE = (
    gauge(names.METRIC_NUM_REQUESTS_RUNNING, "requests", "Requests that run."),
    gauge(
        names.METRIC_NUM_REQUESTS_WAITING,
        "requests",
        "Requests that wait: not scheduled yet, or preempted.",
    ),
    gauge(
        names.METRIC_NUM_REQUESTS_WAITING_BY_REASON,
        "requests",
        "The same by reason. capacity: budget, rows or blocks; deferred: anything else.",
        "reason",
    ),
    gauge(names.METRIC_KV_CACHE_USAGE, "ratio", "Share of the KV cache in use; 1 is all of it."),
    gauge(
        names.METRIC_CACHE_CONFIG,
        "",
        "Always 1; the labels have the shape of the KV cache, the null block included.",
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
    ),
    gauge(
        names.METRIC_LORA_REQUESTS,
        "",
        "Time of the reading, in seconds since the epoch; the labels name the adapters of"
        " requests.",
        "max_lora",
        "waiting_lora_adapters",
        "running_lora_adapters",
    ),
    counter(
        names.METRIC_EXTERNAL_PREFIX_CACHE_QUERIES,
        "tokens",
        "Tokens of admitted requests after their local hits, which the connector looked up.",
    ),
    counter(
        names.METRIC_EXTERNAL_PREFIX_CACHE_HITS,
        "tokens",
        "Of these, tokens whose keys and values were loaded.",
    ),
    counter(
        names.METRIC_NUM_PREEMPTIONS,
        "preemptions",
        "Running requests that lost their blocks: to another request, by a lost pool or "
        "worker, or by an operator.",
    ),
    counter(
        names.METRIC_CORRUPTED_REQUESTS,
        "requests",
        "Requests that ended because the model's logits held NaN.",
    ),
)

_TOKENS = (
    counter(
        names.METRIC_PROMPT_TOKENS,
        "tokens",
        "Prompt tokens of requests that have a first token, each request once.",
    ),
    counter(
        names.METRIC_PROMPT_TOKENS_CACHED,
        "tokens",
        "Of the prompt tokens, those found in the prefix cache.",
    ),
    counter(
        names.METRIC_PROMPT_TOKENS_BY_SOURCE,
        "tokens",
        "Prompt tokens by source of keys and values: local_compute, local_cache_hit or "
        "external_kv_transfer.",
        "source",
    ),
    counter(names.METRIC_GENERATION_TOKENS, "tokens", "Tokens generated."),
    histogram(
        names.METRIC_ITERATION_TOKENS,
        "tokens",
        "Tokens computed in a step.",
        buckets.ITERATION_TOKENS,
    ),
)

_REQUESTS = (
    counter(
        names.METRIC_REQUEST_SUCCESS,
        "requests",
        "Sequences that ended, by vLLM's reasons. Refused ones are not among them.",
        "finished_reason",
    ),
    histogram(
        names.METRIC_TIME_TO_FIRST_TOKEN,
        "seconds",
        "From a request's arrival at the gateway to its first token.",
        buckets.FIRST_TOKEN_SECONDS,
    ),
    histogram(
        names.METRIC_INTER_TOKEN_LATENCY,
        "seconds",
        "Between two tokens of one sequence.",
        buckets.TOKEN_SECONDS,
    ),
    histogram(
        names.METRIC_REQUEST_TIME_PER_OUTPUT_TOKEN,
        "seconds",
        "Decode time of a sequence by its tokens after the first; none for one of a single token.",
        buckets.TOKEN_SECONDS,
    ),
    histogram(
        names.METRIC_E2E_REQUEST_LATENCY,
        "seconds",
        "From a request's arrival at the gateway to its end.",
        buckets.REQUEST_SECONDS,
    ),
    histogram(
        names.METRIC_REQUEST_QUEUE_TIME,
        "seconds",
        "From a sequence's arrival at the scheduler until it was scheduled first.",
        buckets.REQUEST_SECONDS,
    ),
    histogram(
        names.METRIC_REQUEST_PREFILL_TIME,
        "seconds",
        "From the first scheduling to the first token, waits after preemptions included.",
        buckets.REQUEST_SECONDS,
    ),
    histogram(
        names.METRIC_REQUEST_DECODE_TIME,
        "seconds",
        "From its first token to its last, waits after preemptions included.",
        buckets.REQUEST_SECONDS,
    ),
    histogram(
        names.METRIC_REQUEST_INFERENCE_TIME,
        "seconds",
        "From when it was scheduled first to its last token.",
        buckets.REQUEST_SECONDS,
    ),
    histogram(
        names.METRIC_REQUEST_PROMPT_TOKENS,
        "tokens",
        "Prompt tokens of a sequence that ended.",
        buckets.REQUEST_TOKENS,
    ),
    histogram(
        names.METRIC_REQUEST_GENERATION_TOKENS,
        "tokens",
        "Tokens that a sequence that ended had generated here.",
        buckets.REQUEST_TOKENS,
    ),
    histogram(
        names.METRIC_REQUEST_MAX_NUM_GENERATION_TOKENS,
        "tokens",
        "The same of each sequence; with n > 1 vLLM counts only the longest one.",
        buckets.REQUEST_TOKENS,
    ),
    histogram(
        names.METRIC_REQUEST_PREFILL_KV_COMPUTED_TOKENS,
        "tokens",
        "Prompt tokens of a sequence that were not found in the prefix cache.",
        buckets.REQUEST_TOKENS,
    ),
    histogram(
        names.METRIC_REQUEST_PARAMS_N, "sequences", "The parameter n of requests.", buckets.CHOICES
    ),
    histogram(
        names.METRIC_REQUEST_PARAMS_MAX_TOKENS,
        "tokens",
        "The parameter max_tokens of sequences that ended; without it, the rest of the "
        "model's length.",
        buckets.REQUEST_TOKENS,
    ),
)

_SPECULATION = (
    counter(
        names.METRIC_SPEC_DECODE_DRAFTS,
        "verifications",
        "Times that a step verified drafts of a request.",
    ),
    counter(names.METRIC_SPEC_DECODE_DRAFT_TOKENS, "tokens", "Drafts that were verified."),
    counter(
        names.METRIC_SPEC_DECODE_ACCEPTED_TOKENS, "tokens", "Drafts that equal the sampled tokens."
    ),
    counter(
        names.METRIC_SPEC_DECODE_ACCEPTED_TOKENS_PER_POS,
        "tokens",
        "The same by position in a verification, from 0.",
        "position",
    ),
)

_POOL = (
    counter(
        names.METRIC_PREFIX_CACHE_QUERIES,
        "tokens",
        "Prompt tokens looked up by admissions, except after a preemption.",
        "engine",
    ),
    counter(
        names.METRIC_PREFIX_CACHE_HITS,
        "tokens",
        "Prompt tokens found by admissions, except after a preemption.",
        "engine",
    ),
)

SPECS: tuple[MetricSpec, ...] = (
    *(
        replace(spec, source=Source.SCHEDULER)
        for spec in (*_STATE, *_TOKENS, *_REQUESTS, *_SPECULATION)
    ),
    *(replace(spec, source=Source.KVPOOL) for spec in _POOL),
)
