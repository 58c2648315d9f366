"""Metrics of a replica's scheduler, pool and workers that have no vLLM name."""

from dataclasses import replace

from services.common.telemetry import names
from services.common.telemetry.metric_specs import buckets
from services.common.telemetry.metric_specs.spec import (
    MetricSpec,
    Source,
    counter,
    gauge,
    histogram,
    summary,
)

_SCHEDULER = (
    gauge(
        names.METRIC_WAITING_BY_REASON,
        "requests",
        "Requests that wait, by the reason of the queue's head.",
        "reason",
    ),
    counter(
        names.METRIC_WAIT_STEPS,
        "steps",
        "Steps after which requests still waited, by the reason.",
        "reason",
    ),
    counter(
        names.METRIC_WAIT_SECONDS,
        "seconds",
        "Waiting time of requests by reason, counted when the wait ends.",
        "reason",
    ),
    gauge(
        names.METRIC_QUEUE_ESTIMATE,
        "seconds",
        "Expected wait of a new request, by which requests are refused.",
    ),
    gauge(
        names.METRIC_ENGINE_STATE,
        "",
        "1 for the engine's state (idle, running, paused, recovering), else 0.",
        "state",
    ),
    histogram(
        names.METRIC_STEP_SECONDS,
        "seconds",
        "Time of a step, without its overlap with the step before.",
        buckets.STEP_SECONDS,
    ),
    summary(
        names.METRIC_STEP_PUT_OFF_SECONDS,
        "seconds",
        "Delay of a step's planning while the previous step ran, so that late requests "
        "are part of it.",
    ),
    counter(
        names.METRIC_STEP_LATE_SECONDS,
        "seconds",
        "Time in which workers had no step between two overlapping steps.",
    ),
    counter(
        names.METRIC_LOST_TOKENS, "tokens", "Computed tokens that preemptions for blocks discarded."
    ),
    counter(
        names.METRIC_RECOVERIES,
        "recoveries",
        "New generations because pool or workers were lost or hung.",
        "lost",
    ),
    gauge(
        names.METRIC_TIER_BLOCKS,
        "blocks",
        "Blocks of the tier of offloaded keys and values, on each rank; 0 without one.",
    ),
    gauge(names.METRIC_TIER_BLOCKS_HELD, "blocks", "Of these, blocks that can be loaded."),
    counter(
        names.METRIC_TIER_TRANSFERS,
        "blocks",
        "Blocks of the tier that were stored, loaded, evicted, or invalid (missing or "
        "damaged) at a load.",
        "kind",
    ),
    gauge(names.METRIC_SESSIONS, "sessions", "Gateways that are connected."),
    gauge(
        names.METRIC_CLIENT_SESSIONS,
        "sessions",
        "Open sessions of clients at the replica: in a turn, or waiting for input.",
        "state",
    ),
    counter(
        names.METRIC_CLIENT_SESSIONS_GIVEN_UP,
        "sessions",
        "Sessions of clients whose blocks were freed for other requests.",
    ),
    gauge(
        names.METRIC_REGISTRATION_UP,
        "",
        "1 if this scheduler is in the registry in Redis, by the last call.",
    ),
    counter(
        names.METRIC_REGISTRATION_FAILURES,
        "calls",
        "Renewals of the lease in the registry that failed.",
    ),
)

_POOL = (
    gauge(
        names.METRIC_POOL_USAGE,
        "ratio",
        "Share of the blocks that are held, 1 is all of them.",
        "engine",
    ),
    gauge(names.METRIC_POOL_CACHED_HASHES, "blocks", "Hashes that can be found.", "engine"),
    counter(
        names.METRIC_POOL_EVICTIONS,
        "blocks",
        "Cached blocks that were reused for something else.",
        "engine",
    ),
    counter(
        names.METRIC_POOL_REUSES, "blocks", "Free cached blocks that an admission found.", "engine"
    ),
    counter(names.METRIC_POOL_RESETS, "resets", "Resets of the prefix cache.", "engine"),
    counter(names.METRIC_POOL_TRANSACTIONS, "transactions", "Transactions applied.", "engine"),
    summary(
        names.METRIC_POOL_BLOCK_LIFETIME,
        "transactions",
        "From a block's publication to its eviction.",
        "engine",
    ),
    summary(
        names.METRIC_POOL_BLOCK_IDLE_BEFORE_EVICT,
        "transactions",
        "From a block's last release to its eviction.",
        "engine",
    ),
    summary(
        names.METRIC_POOL_BLOCK_REUSE_GAP,
        "transactions",
        "From a block's last release until an admission found it.",
        "engine",
    ),
    counter(names.METRIC_DIRECTORY_ENTRIES, "entries", "Entries written to the log in Redis."),
    counter(names.METRIC_DIRECTORY_KEYS, "blocks", "Keys in those entries."),
    counter(names.METRIC_DIRECTORY_SNAPSHOTS, "snapshots", "Snapshots written."),
    counter(names.METRIC_DIRECTORY_LIVES, "epochs", "Epochs of nodes begun."),
    counter(
        names.METRIC_DIRECTORY_FAILURES, "calls", "Calls of Redis that failed; each ends an epoch."
    ),
    counter(
        names.METRIC_DIRECTORY_DROPPED,
        "blocks",
        "Changes dropped because too many were unwritten; a snapshot replaces them.",
    ),
    gauge(names.METRIC_DIRECTORY_CONNECTED, "pools", "Pools whose epoch is in Redis."),
    gauge(names.METRIC_DIRECTORY_UNWRITTEN, "blocks", "Changes not written yet."),
)

_WORKER = (
    histogram(
        names.METRIC_WORKER_STEP_SECONDS,
        "seconds",
        "Time of a step's forward pass and sampling.",
        buckets.STEP_SECONDS,
    ),
    summary(
        names.METRIC_WORKER_STEP_WAIT_SECONDS, "seconds", "From a step's arrival to its start."
    ),
    counter(names.METRIC_WORKER_TOKENS, "tokens", "Tokens computed."),
    gauge(names.METRIC_WORKER_KV_CACHE_BYTES, "bytes", "Memory of the KV cache."),
    counter(names.METRIC_WORKER_STREAMS, "streams", "Streams of steps that a scheduler opened."),
)

SPECS: tuple[MetricSpec, ...] = (
    *(replace(spec, source=Source.SCHEDULER) for spec in _SCHEDULER),
    *(replace(spec, source=Source.KVPOOL) for spec in _POOL),
    *(replace(spec, source=Source.WORKER) for spec in _WORKER),
)
