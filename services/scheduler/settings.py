"""Settings of the scheduler."""

from dataclasses import dataclass
from pathlib import Path

from services.common.logs import LogFormat, LogLevel
from services.common.settings import at_least, between, not_empty, setting
from services.scheduler.core.config import Policy


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """One replica's scheduler: queues, token budget, policy, engine loop."""

    kvpool: str = setting(doc="address of the kvpool: host:port or unix:PATH")
    workers: tuple[str, ...] = setting(
        doc="addresses of all ranks of the worker, in rank order", check=not_empty
    )
    address: str = setting(
        "127.0.0.1:9001", doc="where to listen: host:port, port 0 for a free one, or unix:PATH"
    )
    metrics_host: str = setting("127.0.0.1", doc="address of the Prometheus metrics")
    metrics_port: int | None = setting(
        None,
        doc="port of the Prometheus metrics, 0 for a free one; none are served without it",
        check=between(0, 65_535),
    )
    replica: str = setting("replica-0", doc="name of this replica, and of its pool")
    policy: Policy = setting(Policy.FCFS, doc="who waits first and who is preempted")
    max_num_seqs: int | None = setting(
        None, doc="requests that may run at once (default: the worker's)", check=at_least(1)
    )
    max_num_batched_tokens: int | None = setting(
        None, doc="token budget of a step (default: the worker's)", check=at_least(1)
    )
    max_num_waiting: int = setting(
        1024, doc="requests that may wait; further ones are refused", check=at_least(1)
    )
    max_queue_seconds: float = setting(
        60.0,
        doc="time that a request may wait to be scheduled first; one that would wait longer is "
        "refused; 0: no limit",
        check=at_least(0),
    )
    async_scheduling: bool = setting(
        True, doc="plan a step while the one before it runs: two steps in flight"
    )
    enable_prefix_caching: bool = setting(True, doc="find and share cached prompt prefixes")
    enable_chunked_prefill: bool = setting(
        True, doc="cut prompts into chunks; otherwise a prompt runs whole or waits"
    )
    long_prefill_token_threshold: int = setting(
        0,
        doc="most prompt tokens of one request in a step that others share; 0: no limit",
        check=at_least(0),
    )
    long_prefill_token_threshold_adaptive: bool = setting(
        False, doc="raise that threshold to an even share of the step where it is more"
    )
    scheduler_reserve_full_isl: bool = setting(
        True, doc="admit only who could now have blocks for the whole sequence"
    )
    watermark: float = setting(
        0.0,
        doc="share of the pool kept free when a request joins running ones",
        check=between(0, 1),
    )
    step_timeout_seconds: float = setting(
        120.0, doc="a step that takes longer means that the worker hangs", check=at_least(0.1)
    )
    pool_timeout_seconds: float = setting(
        5.0, doc="a transaction that takes longer means that the pool is lost", check=at_least(0.1)
    )
    drain_seconds: float = setting(
        5.0, doc="time for running requests to end after SIGTERM", check=at_least(0)
    )
    step_log: Path | None = setting(
        None,
        doc="file for a log of every step, prompts included, for `stepwell replay`; "
        "compressed where its name ends in .zst",
    )
    otlp_endpoint: str = setting("", doc="OTLP/gRPC endpoint for traces; empty: no traces")
    trace_sample_ratio: float = setting(
        1.0, doc="share of engine steps to trace", check=between(0, 1)
    )
    log_level: LogLevel = setting(LogLevel.INFO, doc="least severe level that is logged")
    log_format: LogFormat = setting(LogFormat.TEXT, doc="how log lines look")
