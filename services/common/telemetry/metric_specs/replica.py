"""Metrics of a replica's scheduler, pool and workers that vLLM does not have."""

from services.common.telemetry.metric_specs import buckets
from services.common.telemetry.metric_specs.spec import Source, Specs

_scheduler = Specs(Source.SCHEDULER)
WAITING_BY_REASON = _scheduler.gauge(
    "stepwell_num_requests_waiting_by_reason",
    "requests",
    "Requests that wait, by the reason of the queue's head.",
    "reason",
)
WAIT_STEPS = _scheduler.counter(
    "stepwell_wait_steps",
    "steps",
    "Steps after which requests still waited, by the reason.",
    "reason",
)
WAIT_SECONDS = _scheduler.counter(
    "stepwell_wait_seconds",
    "seconds",
    "Waiting time of requests by reason, counted when the wait ends.",
    "reason",
)
QUEUE_ESTIMATE = _scheduler.gauge(
    "stepwell_queue_estimate_seconds",
    "seconds",
    "Expected wait of a new request, by which requests are refused.",
)
ENGINE_STATE = _scheduler.gauge(
    "stepwell_engine_state",
    "",
    "1 for the engine's state (idle, running, paused, recovering), else 0.",
    "state",
)
STEP_SECONDS = _scheduler.histogram(
    "stepwell_step_seconds",
    "seconds",
    "Time of a step, without its overlap with the step before.",
    buckets.STEP_SECONDS,
)
STEP_PUT_OFF_SECONDS = _scheduler.summary(
    "stepwell_step_put_off_seconds",
    "seconds",
    "Delay of a step's planning while the previous step ran, so that late requests are part of it.",
)
STEP_LATE_SECONDS = _scheduler.counter(
    "stepwell_step_late_seconds",
    "seconds",
    "Time in which workers had no step between two overlapping steps.",
)
LOST_TOKENS = _scheduler.counter(
    "stepwell_preempted_tokens", "tokens", "Computed tokens that preemptions for blocks discarded."
)
PROGRAMS = _scheduler.gauge(
    "stepwell_programs",
    "programs",
    "Programs of agents with a turn that waits or runs, and programs in a pause.",
    "state",
)
PROGRAMS_BEGUN = _scheduler.counter(
    "stepwell_programs_begun",
    "programs",
    "Programs that began, named by an id or found by the hashes of prompts.",
    "source",
)
PROGRAM_SECONDS = _scheduler.histogram(
    "stepwell_program_seconds",
    "seconds",
    "Time from a program's first turn to the end of its last one.",
    buckets.PROGRAM_SECONDS,
)
PROGRAM_TURNS = _scheduler.histogram(
    "stepwell_program_turns", "turns", "Turns of programs that have ended.", buckets.PROGRAM_TURNS
)
PAUSE_SECONDS = _scheduler.histogram(
    "stepwell_pause_seconds",
    "seconds",
    "Pauses between turns, by the tool; at most 64 tools and (others).",
    buckets.PAUSE_SECONDS,
    "tool",
)
RETAINED_BLOCKS = _scheduler.gauge(
    "stepwell_retained_blocks", "blocks", "Blocks of contexts of paused programs: free, or pinned."
)
RETAINED_BLOCKS_TAKEN = _scheduler.counter(
    "stepwell_retained_blocks_taken",
    "blocks",
    "Blocks that other requests took from contexts of programs, paused or with a waiting turn.",
    "state",
)
RECOMPUTED_TOKENS = _scheduler.counter(
    "stepwell_recomputed_tokens",
    "tokens",
    "Tokens of programs that were computed again: contexts were evicted in a pause, turns were "
    "preempted, or pool or workers were lost.",
    "cause",
)
RECOVERIES = _scheduler.counter(
    "stepwell_recoveries",
    "recoveries",
    "New generations because pool or workers were lost or hung.",
    "lost",
)
TIER_BLOCKS = _scheduler.gauge(
    "stepwell_kv_tier_blocks",
    "blocks",
    "Blocks of the tier of offloaded keys and values, on each rank; 0 without one.",
)
TIER_BLOCKS_HELD = _scheduler.gauge(
    "stepwell_kv_tier_blocks_held", "blocks", "Of these, blocks that can be loaded."
)
TIER_TRANSFERS = _scheduler.counter(
    "stepwell_kv_tier_transfers",
    "blocks",
    "Blocks of the tier that were stored, loaded, evicted, or invalid (missing or "
    "damaged) at a load.",
    "kind",
)
SESSIONS = _scheduler.gauge("stepwell_sessions", "sessions", "Gateways that are connected.")
CLIENT_SESSIONS = _scheduler.gauge(
    "stepwell_client_sessions",
    "sessions",
    "Open sessions of clients at the replica: in a turn, or waiting for input.",
    "state",
)
CLIENT_SESSIONS_GIVEN_UP = _scheduler.counter(
    "stepwell_client_sessions_given_up",
    "sessions",
    "Sessions of clients whose blocks were freed for other requests.",
)
REGISTRATION_UP = _scheduler.gauge(
    "stepwell_registration_up",
    "",
    "1 if this scheduler is in the registry in Redis, by the last call.",
)
REGISTRATION_FAILURES = _scheduler.counter(
    "stepwell_registration_failures", "calls", "Renewals of the lease in the registry that failed."
)

_pool = Specs(Source.KVPOOL)
POOL_USAGE = _pool.gauge(
    "stepwell_kvpool_usage_perc",
    "ratio",
    "Share of the blocks that are held, 1 is all of them.",
    "engine",
)
POOL_CACHED_HASHES = _pool.gauge(
    "stepwell_kvpool_cached_hashes", "blocks", "Hashes that can be found.", "engine"
)
POOL_EVICTIONS = _pool.counter(
    "stepwell_kvpool_evictions",
    "blocks",
    "Cached blocks that were reused for something else.",
    "engine",
)
POOL_REUSES = _pool.counter(
    "stepwell_kvpool_reuses", "blocks", "Free cached blocks that an admission found.", "engine"
)
POOL_RESETS = _pool.counter(
    "stepwell_kvpool_resets", "resets", "Resets of the prefix cache.", "engine"
)
POOL_TRANSACTIONS = _pool.counter(
    "stepwell_kvpool_transactions", "transactions", "Transactions applied.", "engine"
)

# Ages of cached blocks: vLLM's kv_block_lifetime, idle_before_evict and reuse_gap. They cover every
# block instead of a sample, and count transactions (about one per engine step) instead of seconds.
POOL_BLOCK_LIFETIME = _pool.summary(
    "stepwell_kvpool_block_lifetime_transactions",
    "transactions",
    "From a block's publication to its eviction.",
    "engine",
)
POOL_BLOCK_IDLE_BEFORE_EVICT = _pool.summary(
    "stepwell_kvpool_block_idle_before_evict_transactions",
    "transactions",
    "From a block's last release to its eviction.",
    "engine",
)
POOL_BLOCK_REUSE_GAP = _pool.summary(
    "stepwell_kvpool_block_reuse_gap_transactions",
    "transactions",
    "From a block's last release until an admission found it.",
    "engine",
)
DIRECTORY_ENTRIES = _pool.counter(
    "stepwell_directory_entries", "entries", "Entries written to the log in Redis."
)
DIRECTORY_KEYS = _pool.counter("stepwell_directory_keys", "blocks", "Keys in those entries.")
DIRECTORY_SNAPSHOTS = _pool.counter(
    "stepwell_directory_snapshots", "snapshots", "Snapshots written."
)
DIRECTORY_LIVES = _pool.counter("stepwell_directory_lives", "epochs", "Epochs of nodes begun.")
DIRECTORY_FAILURES = _pool.counter(
    "stepwell_directory_failures", "calls", "Calls of Redis that failed; each ends an epoch."
)
DIRECTORY_DROPPED = _pool.counter(
    "stepwell_directory_dropped_keys",
    "blocks",
    "Changes dropped because too many were unwritten; a snapshot replaces them.",
)
DIRECTORY_CONNECTED = _pool.gauge(
    "stepwell_cache_nodes_connected", "pools", "Pools whose epoch is in Redis."
)
DIRECTORY_UNWRITTEN = _pool.gauge(
    "stepwell_directory_unwritten_keys", "blocks", "Changes not written yet."
)

_worker = Specs(Source.WORKER)
WORKER_STEP_SECONDS = _worker.histogram(
    "stepwell_worker_step_seconds",
    "seconds",
    "Time of a step's forward pass and sampling.",
    buckets.STEP_SECONDS,
)
WORKER_STEP_WAIT_SECONDS = _worker.summary(
    "stepwell_worker_step_wait_seconds", "seconds", "From a step's arrival to its start."
)
WORKER_TOKENS = _worker.counter("stepwell_worker_tokens", "tokens", "Tokens computed.")
WORKER_KV_CACHE_BYTES = _worker.gauge(
    "stepwell_worker_kv_cache_bytes", "bytes", "Memory of the KV cache."
)
WORKER_KERNELS = _worker.gauge(
    "stepwell_worker_kernels_info",
    "",
    "Always 1; the labels tell what computes, and in which data types.",
    "kernels",
    "dtype",
    "cache_dtype",
)
WORKER_STREAMS = _worker.counter(
    "stepwell_worker_streams", "streams", "Streams of steps that a scheduler opened."
)

SPECS = [*_scheduler.all, *_pool.all, *_worker.all]
