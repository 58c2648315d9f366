"""Metrics of a replica's scheduler, pool and workers that vLLM does not have."""

from services.common.telemetry.metric_specs import buckets
from services.common.telemetry.metric_specs.spec import Source, Specs

_scheduler = Specs(Source.SCHEDULER)
WAITING_BY_REASON = _scheduler.gauge(
    "stepwell_num_requests_waiting_by_reason",
    "requests",
    "Waiting requests, by the reason why the first request of the queue waits.",
    "reason",
)
WAIT_STEPS = _scheduler.counter(
    "stepwell_wait_steps",
    "steps",
    "Steps after which requests still waited, by the reason of the first request of the queue.",
    "reason",
)
WAIT_SECONDS = _scheduler.counter(
    "stepwell_wait_seconds",
    "seconds",
    "Time for which requests waited, by reason, counted when the wait ends.",
    "reason",
)
QUEUE_ESTIMATE = _scheduler.gauge(
    "stepwell_queue_estimate_seconds",
    "seconds",
    "Expected wait of a new request; the scheduler refuses requests that may not wait so long.",
)
ENGINE_STATE = _scheduler.gauge(
    "stepwell_engine_state",
    "",
    "1 for the engine's state (idle, running, paused, recovering), else 0. Until the pool and the "
    "workers have started, the only state is starting, and the series has no label model_name.",
    "state",
)
STEP_SECONDS = _scheduler.histogram(
    "stepwell_step_seconds",
    "seconds",
    "Time of a step, without the time in which the previous step still ran.",
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
    "stepwell_kv_tier_blocks_held",
    "blocks",
    "Blocks of the tier of offloaded keys and values that can be loaded.",
)
TIER_TRANSFERS = _scheduler.counter(
    "stepwell_kv_tier_transfers",
    "blocks",
    "Blocks of the tier that were stored, loaded, evicted, or invalid (missing or "
    "damaged) at a load.",
    "kind",
)
SESSIONS = _scheduler.gauge(
    "stepwell_sessions", "sessions", "Gateways that are connected to the scheduler."
)
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
    "Share of the pool's blocks that requests hold; 1 is all blocks.",
    "engine",
)
POOL_CACHED_HASHES = _pool.gauge(
    "stepwell_kvpool_cached_hashes",
    "blocks",
    "Hashes of cached blocks in the pool's prefix index.",
    "engine",
)
POOL_EVICTIONS = _pool.counter(
    "stepwell_kvpool_evictions",
    "blocks",
    "Cached blocks that were evicted because a request needed the block.",
    "engine",
)
POOL_REUSES = _pool.counter(
    "stepwell_kvpool_reuses",
    "blocks",
    "Free cached blocks that an admission found and reused.",
    "engine",
)
POOL_RESETS = _pool.counter(
    "stepwell_kvpool_resets", "resets", "Resets of the pool's prefix cache.", "engine"
)
POOL_TRANSACTIONS = _pool.counter(
    "stepwell_kvpool_transactions", "transactions", "Transactions applied.", "engine"
)

# Ages of cached blocks: vLLM's kv_block_lifetime, idle_before_evict and reuse_gap. They cover every
# block instead of a sample, and count transactions (about one per engine step) instead of seconds.
POOL_BLOCK_LIFETIME = _pool.summary(
    "stepwell_kvpool_block_lifetime_transactions",
    "transactions",
    "Time from a block's publication in the prefix index to its eviction.",
    "engine",
)
POOL_BLOCK_IDLE_BEFORE_EVICT = _pool.summary(
    "stepwell_kvpool_block_idle_before_evict_transactions",
    "transactions",
    "Time from a block's last release to its eviction.",
    "engine",
)
POOL_BLOCK_REUSE_GAP = _pool.summary(
    "stepwell_kvpool_block_reuse_gap_transactions",
    "transactions",
    "Time from a block's last release until an admission found the block.",
    "engine",
)
DIRECTORY_ENTRIES = _pool.counter(
    "stepwell_directory_entries",
    "entries",
    "Entries that the kvpool wrote to the log of cached prefixes in Redis.",
)
DIRECTORY_KEYS = _pool.counter(
    "stepwell_directory_keys",
    "blocks",
    "Keys of cached blocks in the entries written to the log in Redis.",
)
DIRECTORY_SNAPSHOTS = _pool.counter(
    "stepwell_directory_snapshots", "snapshots", "Snapshots written."
)
DIRECTORY_LIVES = _pool.counter(
    "stepwell_directory_lives", "epochs", "Epochs that the kvpool began for its pools in Redis."
)
DIRECTORY_FAILURES = _pool.counter(
    "stepwell_directory_failures",
    "calls",
    "Calls to Redis that failed; each ends the epoch of a pool.",
)
DIRECTORY_DROPPED = _pool.counter(
    "stepwell_directory_dropped_keys",
    "blocks",
    "Changes of pools dropped because too many were unwritten; a snapshot replaces them.",
)
DIRECTORY_CONNECTED = _pool.gauge(
    "stepwell_cache_nodes_connected", "pools", "Pools whose epoch is in Redis."
)
DIRECTORY_UNWRITTEN = _pool.gauge(
    "stepwell_directory_unwritten_keys",
    "blocks",
    "Changes of pools that are not yet written to Redis.",
)

_worker = Specs(Source.WORKER)
WORKER_STEP_SECONDS = _worker.histogram(
    "stepwell_worker_step_seconds",
    "seconds",
    "Time of a step's forward pass and sampling on the worker.",
    buckets.STEP_SECONDS,
)
WORKER_STEP_WAIT_SECONDS = _worker.summary(
    "stepwell_worker_step_wait_seconds",
    "seconds",
    "Time from a step's arrival at the worker to its start.",
)
WORKER_TOKENS = _worker.counter("stepwell_worker_tokens", "tokens", "Tokens computed.")
WORKER_KV_CACHE_BYTES = _worker.gauge(
    "stepwell_worker_kv_cache_bytes", "bytes", "Memory of the KV cache."
)
WORKER_KERNELS = _worker.gauge(
    "stepwell_worker_kernels_info",
    "",
    "Always 1; the labels name the worker's device, backend and data types.",
    "kernels",
    "dtype",
    "cache_dtype",
)
WORKER_STREAMS = _worker.counter(
    "stepwell_worker_streams", "streams", "Streams of steps that a scheduler opened."
)

SPECS = [*_scheduler.all, *_pool.all, *_worker.all]
