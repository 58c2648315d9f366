"""Settings of the scheduler."""

from dataclasses import dataclass
from pathlib import Path

from services.common.model_source.find import find_model_files
from services.common.process.service_settings import ServiceSettings, allowed_names, server_name
from services.common.process.settings import (
    at_least,
    between,
    not_empty,
    one_of,
    setting,
    with_default,
)
from services.common.redis.url import is_redis_url
from services.common.rpc.addresses import is_connect_address, is_host_port, is_listen_address
from services.scheduler.core.policies import POLICIES, check_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(ServiceSettings):
    """Settings of one replica's scheduler: queues, token budget, policy, engine loop."""

    kvpool: str = setting(doc="address of the kvpool: host:port or unix:PATH")
    workers: tuple[str, ...] = setting(
        doc="addresses of all ranks of the worker, in rank order", check=not_empty
    )
    address: str = with_default(ServiceSettings, "address", "127.0.0.1:9001")
    internal_tls_allowed_names: tuple[str, ...] = allowed_names()
    internal_tls_server_name: str | None = server_name()
    metrics_address: str | None = setting(
        None,
        doc="host:port of the Prometheus metrics (default: none are served)",
        check=is_host_port,
    )
    replica: str = setting("replica-0", doc="name of this replica, also in its kvpool")
    redis_url: str | None = setting(
        None,
        doc="Redis in which this scheduler registers for gateways: "
        "redis://[user:password@]host:port, or rediss://host:port?ssl_ca_certs=PATH; any node"
        " of a cluster (default: gateways need its address)",
        check=is_redis_url,
        is_secret=True,
    )
    advertise_address: str | None = setting(
        None,
        doc="address under which gateways find this scheduler in Redis: host:port or unix:PATH "
        "(default: address)",
        check=is_connect_address,
    )
    policy: str = setting(
        "fcfs",
        doc="policy that chooses the order of admission and the request to preempt: "
        + ", ".join(POLICIES)
        + " or package.module:Class",
        check=check_policy,
    )
    program_idle_seconds: float | None = setting(
        None,
        doc="with a policy that groups requests into programs: seconds without a request after "
        "which a program counts as ended (default: 600)",
        check=at_least(1),
    )
    max_num_programs: int | None = setting(
        None,
        doc="with a policy that groups requests into programs: maximum number of named programs, "
        "and of contexts of paused programs, that the scheduler stores (default: 65536)",
        check=at_least(1),
    )
    retention_headroom: float | None = setting(
        None,
        doc="with policy program: share of the pool that is left free when a request whose "
        "context is not cached is admitted (default: 0.1)",
        check=between(0, 0.5),
    )
    aging_interval: int | None = setting(
        None,
        doc="with policy program: one in this many admissions of requests without a cached "
        "context admits the longest waiting request (default: 8)",
        check=at_least(1),
    )
    max_warm_admissions: int | None = setting(
        None,
        doc="with policy program: maximum number of admissions of requests with a cached context "
        "while a request without one waits; then that request is admitted (default: 32)",
        check=at_least(1),
    )
    max_num_waiting: int = setting(
        1024,
        doc="maximum number of waiting requests; further requests are refused",
        check=at_least(1),
    )
    max_queue_seconds: float = setting(
        60.0,
        doc="longest time that a request may wait for its first step; 0: no limit. A request that "
        "would wait longer is refused",
        check=between(0, 86_400),
    )
    max_num_sessions: int | None = setting(
        None,
        doc="maximum number of clients' sessions that keep blocks and a batch row between turns; "
        "further sessions are computed again, with prefix hits (default: half of the requests "
        "that may run)",
        check=at_least(0),
    )
    async_scheduling: bool = setting(
        True,
        doc="plan a step while the previous step runs. With pipeline stages, one step per stage "
        "is in flight in any case",
    )
    enable_prefix_caching: bool = setting(True, doc="find and share cached prompt prefixes")
    prefix_match_unit: int | None = setting(
        None,
        doc="with recurrent layers: number of tokens per block hash, a divisor of the block size; "
        "cached prefixes may then end at any multiple of it (default: the block size)",
        check=at_least(1),
    )
    enable_chunked_prefill: bool = setting(
        True,
        doc="divide prompts into chunks; otherwise a prompt is computed in one step, and waits "
        "until it fits",
    )
    long_prefill_token_threshold: int = setting(
        0,
        doc="maximum number of prompt tokens of one request in a step with other requests; 0: no "
        "limit",
        check=at_least(0),
    )
    long_prefill_token_threshold_adaptive: bool = setting(
        False,
        doc="raise long_prefill_token_threshold, if it is above 0, to max_num_batched_tokens "
        "divided by the number of running and waiting requests, if that is more",
    )
    scheduler_reserve_full_isl: bool = setting(
        True, doc="admit a request only if there are free blocks for its whole sequence"
    )
    max_num_active_seqs: int | None = setting(
        None,
        doc="maximum number of requests that run at once (default: the worker's max_num_seqs)",
        check=at_least(1),
    )
    prefill_schedule_interval: int = setting(
        1,
        doc="while requests decode, compute prompts in only one of this many steps, unless "
        "prompts arrive faster",
        check=at_least(1),
    )
    watermark: float = setting(
        0.0,
        doc="share of the pool's blocks that stays free when a request is admitted beside running "
        "requests",
        check=between(0, 1),
    )
    step_timeout_seconds: float = setting(
        120.0,
        doc="longest time of a step; after that, the worker counts as hung",
        check=between(0.1, 86_400),
    )
    pool_timeout_seconds: float = setting(
        5.0,
        doc="longest time of a transaction with the kvpool; after that, the kvpool counts as lost",
        check=between(0.1, 86_400),
    )
    step_log: Path | None = setting(
        None,
        doc="file for a log of every step, prompts included, for `stepwell replay`; .zst: "
        "compressed",
    )
    model: Path | None = setting(
        None,
        doc="directory, GGUF file or hub name of the model whose configuration and tokenizer "
        "vllm.grpc.engine serves; weights are not read",
        read=find_model_files,
    )
    vllm_grpc_address: str | None = setting(
        None,
        doc="host:port or unix:PATH where vllm.grpc.engine.VllmEngine is served to gateways such "
        "as smg (default: nowhere)",
        check=is_listen_address,
    )
    vllm_grpc_client_stops: bool = setting(
        False,
        doc="accept requests with stop strings over vllm.grpc.engine. The client must find the "
        "stop strings itself, as smg does. Otherwise such requests are refused",
    )
    kv_events_endpoint: str | None = setting(
        None,
        doc="ZMQ endpoint that publishes KV events in vLLM's format: tcp://*:5557 listens, an "
        "address without * connects (default: none)",
    )
    kv_events_replay_endpoint: str | None = setting(
        None,
        doc="ZMQ endpoint from which subscribers request missed KV events, such as tcp://*:5558 "
        "(default: none)",
    )
    kv_events_topic: str = setting("", doc="topic of the KV events, such as kv@10.0.0.7@llama")
    kv_events_encoding: str = setting(
        "map",
        doc="encoding of KV events: map, or array as vLLM before 0.24",
        check=one_of(("map", "array")),
    )
    kv_events_buffer_steps: int = setting(
        10_000,
        doc="number of latest batches of KV events that are stored for subscribers that lag or "
        "have missed batches",
        check=at_least(1),
    )
    trace_step_sample_ratio: float = setting(
        0.01,
        doc="share of the engine steps with traced requests that are traced. Of other steps, this "
        "share of trace_sample_ratio is traced",
        check=between(0, 1),
    )
