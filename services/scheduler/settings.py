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
from services.scheduler.core.policies import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(ServiceSettings):
    """Schedules one replica: queues, token budget, policy, engine loop."""

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
    replica: str = setting("replica-0", doc="name of this replica, and of its pool")
    redis_url: str | None = setting(
        None,
        doc="Redis in which this scheduler registers itself, for gateways that serve its model, "
        "redis://[user:password@]host:port, or rediss://host:port?ssl_ca_certs=PATH with TLS; a "
        "cluster by any of its nodes (default: gateways must be given its address)",
        check=is_redis_url,
        is_secret=True,
    )
    advertise_address: str | None = setting(
        None,
        doc="where gateways reach this scheduler, as it registers itself: host:port or unix:PATH "
        "(default: where it listens)",
        check=is_connect_address,
    )
    policy: str = setting(
        "fcfs",
        doc="the order of admission, and which request is preempted: " + " or ".join(POLICIES),
        check=one_of(POLICIES),
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
    max_num_sessions: int | None = setting(
        None,
        doc="sessions of clients that keep their blocks and a place between two turns; further "
        "ones are computed again from what is cached (default: half of the requests that may run)",
        check=at_least(0),
    )
    async_scheduling: bool = setting(
        True,
        doc="plan a step while the one before it runs: two steps in flight; with pipeline stages "
        "there are as many as stages in any case, and no request is in two of them",
    )
    enable_prefix_caching: bool = setting(True, doc="find and share cached prompt prefixes")
    prefix_match_unit: int | None = setting(
        None,
        doc="tokens of a block hash, of which blocks are a multiple: with recurrent layers prompts "
        "are then found up to their last unit, inside a block too (default: a block)",
        check=at_least(1),
    )
    enable_chunked_prefill: bool = setting(
        True, doc="cut prompts into chunks; otherwise a prompt runs whole or waits"
    )
    long_prefill_token_threshold: int = setting(
        0,
        doc="most prompt tokens of one request in a step that others share; 0: no limit",
        check=at_least(0),
    )
    long_prefill_token_threshold_adaptive: bool = setting(
        False, doc="raise that threshold, if there is one, to an even share of the step"
    )
    scheduler_reserve_full_isl: bool = setting(
        True, doc="admit a request only if there are free blocks for its whole sequence"
    )
    max_num_active_seqs: int | None = setting(
        None,
        doc="requests that may run at once, where fewer than the worker's max_num_seqs shall "
        "(default: as many)",
        check=at_least(1),
    )
    prefill_schedule_interval: int = setting(
        1,
        doc="while requests decode, compute prompts only in one of this many steps, unless prompts "
        "come faster than that",
        check=at_least(1),
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
    step_log: Path | None = setting(
        None,
        doc="file for a log of every step, prompts included, for `stepwell replay`; "
        "compressed where its name ends in .zst",
    )
    model: Path | None = setting(
        None,
        doc="directory of the model, GGUF file, or name on the hub, whose configuration and "
        "tokenizer vllm.grpc.engine passes on; weights are not read",
        read=find_model_files,
    )
    vllm_grpc_address: str | None = setting(
        None,
        doc="where vllm.grpc.engine.VllmEngine is served, for gateways such as smg: host:port or "
        "unix:PATH (default: it is not)",
        check=is_listen_address,
    )
    vllm_grpc_client_stops: bool = setting(
        False,
        doc="take requests with stop strings through vllm.grpc.engine and leave the strings to the "
        "client, since smg ends the text there by itself; otherwise such requests are refused",
    )
    kv_events_endpoint: str | None = setting(
        None,
        doc="ZMQ endpoint where KV events are published in vLLM's form, such as tcp://*:5557; "
        "without * it is connected to (default: they are not)",
    )
    kv_events_replay_endpoint: str | None = setting(
        None,
        doc="ZMQ endpoint that sends KV events again to a subscriber that missed some, such as "
        "tcp://*:5558 (default: none does)",
    )
    kv_events_topic: str = setting("", doc="topic of the KV events, such as kv@10.0.0.7@llama")
    kv_events_encoding: str = setting(
        "map",
        doc="how KV events are encoded: map, as vLLM does since 0.24, or array, as it did before",
        check=one_of(("map", "array")),
    )
    kv_events_buffer_steps: int = setting(
        10_000,
        doc="batches of KV events that are kept for subscribers that missed some, and that one may "
        "lag behind",
        check=at_least(1),
    )
    trace_step_sample_ratio: float = setting(
        0.01,
        doc="share of the engine steps of traced requests that are traced, too, each as a trace of "
        "its own of the service stepwell-engine-steps; of the other steps, this share of "
        "trace_sample_ratio",
        check=between(0, 1),
    )
