"""Settings of `stepwell up`. The command uses some of them, and forwards the others to services."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.model_source.find import find_model
from services.common.process.logs import LogFormat, LogLevel
from services.common.process.settings import Check, at_least, between, existing_file, setting
from services.common.redis.url import is_redis_url

MAX_REPLICAS, MAX_RANKS = 64, 64
EVERY_SERVICE = ("gateway", "scheduler", "kvpool", "worker")


def passed_to(
    *services: str,
    doc: str,
    check: Check | None = None,
    default: Any = None,
    is_secret: bool = False,
) -> Any:
    """Declares a setting that the given services have under the same name. A value is forwarded to
    these services. None is not forwarded, so that a service's default or variable, such as
    STEPWELL_WORKER_BLOCK_SIZE, applies.
    """
    metadata = {"doc": doc, "check": check, "services": services, "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(service: str) -> tuple[str, ...]:
    """The names of the settings that are forwarded to a service."""
    return tuple(
        field.name
        for field in dataclasses.fields(UpSettings)
        if service in field.metadata.get("services", ())
    )


@dataclass(frozen=True, slots=True)
class UpSettings:
    """Starts a gateway and replicas of scheduler, kvpool and worker, and serves a model.

    Further settings of a service are variables named STEPWELL_<SERVICE>_<NAME>, such as
    STEPWELL_GATEWAY_TRACE_SLOW_SECONDS; `python -m services.gateway --help` lists the gateway's.
    """

    model: Path = setting(
        doc="directory of the model in Hugging Face format, GGUF file, or name on the hub",
        read=find_model,
    )
    host: str = setting("127.0.0.1", doc="address to listen on; 0.0.0.0 for all")
    http_port: int = setting(
        8000, doc="port of the OpenAI-compatible API; 0 for a free one", check=between(0, 65_535)
    )
    grpc_port: int = setting(
        9000, doc="port of the gRPC API; 0 for a free one", check=between(0, 65_535)
    )
    admin_port: int | None = setting(
        None,
        doc="port of 127.0.0.1 for operators' calls such as /pause; 0 for a free one (default: "
        "none)",
        check=between(0, 65_535),
    )
    admin_key: str | None = passed_to(
        "gateway", doc="key that operators' calls must send", is_secret=True
    )
    replicas: int = setting(
        1,
        doc="replicas behind the gateway, which share this machine's cores and memory",
        check=between(1, MAX_REPLICAS),
    )
    routing_policy: str | None = passed_to(
        "gateway", doc="how one of several replicas is chosen, such as cache-aware or least-loaded"
    )
    stream_interval: int | None = passed_to(
        "gateway", doc="tokens of an answer that are sent together in a stream", check=at_least(1)
    )
    unknown_fields: str | None = passed_to(
        "gateway", doc="what becomes of unknown fields of a JSON body: ignore or refuse"
    )
    served_model_name: str | None = passed_to(
        "gateway",
        "worker",
        doc="name that clients use (default: that on the hub, or the directory's)",
    )
    enable_lora: bool | None = passed_to(
        "worker", doc="serve adapters (LoRA, in PEFT's format) beside the model"
    )
    lora_modules: tuple[str, ...] | None = passed_to(
        "gateway", doc="adapters that clients may name in place of the model, each as name=path"
    )
    lora_dir: Path | None = passed_to(
        "gateway", doc="directory from which operators may load further adapters"
    )
    max_loras: int | None = passed_to(
        "worker", doc="adapters that the requests of a step may have", check=at_least(1)
    )
    max_lora_rank: int | None = passed_to(
        "worker", doc="highest rank of an adapter", check=at_least(1)
    )
    max_cpu_loras: int | None = passed_to(
        "worker", doc="adapters in memory (default: max_loras)", check=at_least(1)
    )
    generation_config: str | None = passed_to(
        "gateway",
        doc="where default sampling parameters come from: auto, vllm, or a directory with a "
        "generation_config.json",
    )
    sse_keep_alive_interval: float | None = passed_to(
        "gateway", doc="seconds of silence after which a stream sends a sign of life; 0: never"
    )
    chat_template_content_format: str | None = passed_to(
        "gateway", doc="how the chat template gets the content of a turn: auto, string or openai"
    )
    override_generation_config: str | None = passed_to(
        "gateway", doc="defaults in place of that file's, as a JSON object"
    )
    chat_template: str | None = passed_to(
        "gateway", doc="chat template in place of the model's: a file, or its text"
    )
    default_chat_template_kwargs: str | None = passed_to(
        "gateway", doc="variables of the chat template, as a JSON object"
    )
    reasoning_parser: str | None = passed_to(
        "gateway", doc="how the model marks its reasoning, such as qwen3 or deepseek_r1"
    )
    tool_call_parser: str | None = passed_to(
        "gateway", doc="how the model writes calls of tools, such as hermes or llama3_json"
    )
    enable_auto_tool_choice: bool | None = passed_to(
        "gateway", doc="let the model choose to call tools"
    )
    enable_tokenizer_info_endpoint: bool | None = passed_to(
        "gateway", doc="serve the tokenizer's configuration at /tokenizer_info"
    )
    redis_url: str | None = passed_to(
        "gateway",
        "kvpool",
        doc="URL of the Redis in which kvpools list their cached blocks and further replicas "
        "register, redis://[user:password@]host:port (default: the gateway asks the pools)",
        check=is_redis_url,
        is_secret=True,
    )
    api_keys: tuple[str, ...] | None = passed_to(
        "gateway", doc="API keys, of which clients must send one", is_secret=True
    )
    api_key_file: Path | None = passed_to(
        "gateway", doc="file with keys and limits of tenants, which `stepwell keys` writes"
    )
    api_keys_in_redis: bool | None = passed_to(
        "gateway", doc="keys and limits of tenants are in the Redis of --redis-url"
    )
    ui: bool | None = passed_to(
        "gateway",
        doc="serve the page /ui, /activity and /traces at the HTTP port too (default: yes)",
    )
    share_cache_between_tenants: bool | None = passed_to(
        "gateway", doc="let tenants find one another's prompts in the prefix cache"
    )
    tls_cert_file: Path | None = passed_to(
        "gateway",
        doc="certificate chain (PEM) for clients over HTTP and gRPC (default: no TLS)",
        check=existing_file,
    )
    tls_key_file: Path | None = passed_to(
        "gateway", doc="key of that certificate (PEM)", check=existing_file
    )
    tls_client_ca_file: Path | None = passed_to(
        "gateway",
        doc="authorities (CA, PEM) of clients' certificates (default: clients need no certificate)",
        check=existing_file,
    )
    quantization: str | None = passed_to(
        "worker",
        doc="weights in memory: auto as they are stored, or quantized at load: int8, or w8a8, with "
        "inputs in 8 bits too; on the CPU",
    )
    kv_cache_dtype: str | None = passed_to(
        "worker",
        doc="keys and values in the KV cache: auto as the model computes them, or "
        "int8_per_token_head, in 8 bits; on the CPU",
    )
    runner: str | None = passed_to(
        "worker",
        doc="what the model is run for: auto, generate, or pooling, which answers a prompt with a "
        "vector",
    )
    dtype: str | None = passed_to(
        "worker", doc="data type of weights and KV cache: auto, float32, bfloat16"
    )
    device: str | None = passed_to(
        "worker", doc="what the worker computes on: auto, cpu, cuda, simulated"
    )
    profile: str | None = passed_to(
        "worker",
        doc="the times and the memory of device simulated: the name of a profile, or a TOML file",
    )
    device_faults: str | None = passed_to(
        "worker", doc="faults of device simulated: 'after 30 s: hang 5 s', or a file of them"
    )
    gpu_memory_utilization: float | None = passed_to(
        "worker",
        doc="share of memory that the worker may use, on a GPU of all of it",
        check=between(0.01, 1),
    )
    tensor_parallel_size: int = setting(
        1, doc="workers that divide each layer of a replica's model", check=between(1, MAX_RANKS)
    )
    pipeline_parallel_size: int = setting(
        1, doc="stages that divide the layers of a replica's model", check=between(1, MAX_RANKS)
    )
    num_threads: int | None = passed_to(
        "worker",
        doc="threads that each worker computes with (default: its share of the cores)",
        check=at_least(1),
    )
    cpu_omp_threads_bind: str | None = passed_to(
        "worker",
        doc="processors of the workers' threads: auto, nobind, or a list for each worker, such as "
        "0-31|32-63",
    )
    batch_invariant: bool | None = passed_to(
        "worker",
        doc="compute a request the same bit for bit in any batch (default: on the CPU yes, on CUDA "
        "no)",
    )
    kv_cache_memory_bytes: int | None = passed_to(
        "worker", doc="memory of the KV cache", check=at_least(1)
    )
    kv_offloading_size: float | None = passed_to(
        "worker",
        doc="GiB of memory beside the KV cache in which published blocks are kept; on the CPU only",
        check=at_least(0.0001),
    )
    speculative_config: str | None = passed_to(
        "worker",
        doc="JSON: guess tokens that follow and verify them beside the next one, see "
        "docs/performance.md (default: no speculation)",
    )
    num_blocks: int | None = passed_to(
        "worker", doc="blocks of the KV cache, instead of its memory", check=at_least(2)
    )
    block_size: int | None = passed_to("worker", doc="tokens per block", check=at_least(1))
    mamba_cache_mode: str | None = passed_to(
        "worker", doc="what recurrent layers keep: align or, without prefix caching, none"
    )
    max_model_len: int | None = passed_to(
        "worker", doc="longest sequence, prompt and output together, in tokens", check=at_least(2)
    )
    max_num_seqs: int | None = passed_to(
        "worker", doc="requests that run at once", check=at_least(1)
    )
    max_num_batched_tokens: int | None = passed_to(
        "worker", doc="token budget of a step", check=at_least(1)
    )
    policy: str | None = passed_to(
        "scheduler", doc="the order of admission, such as fcfs or priority"
    )
    program_idle_seconds: float | None = passed_to(
        "scheduler", doc="pause after which a program counts as ended", check=at_least(1)
    )
    max_num_programs: int | None = passed_to(
        "scheduler", doc="named programs that are known", check=at_least(1)
    )
    retention_headroom: float | None = passed_to(
        "scheduler",
        doc="share of the pool that the policy program leaves free when a request joins without its"
        " context",
        check=between(0, 0.5),
    )
    aging_interval: int | None = passed_to(
        "scheduler",
        doc="of so many admissions without a context, the policy program gives one to the longest"
        " waiting",
        check=at_least(1),
    )
    max_warm_admissions: int | None = passed_to(
        "scheduler",
        doc="admissions with a context after which the policy program admits one without",
        check=at_least(1),
    )
    enable_prefix_caching: bool | None = passed_to(
        "scheduler", doc="find and share cached prompt prefixes"
    )
    prefix_match_unit: int | None = passed_to(
        "scheduler", doc="tokens of a block hash, where fewer than a block's", check=at_least(1)
    )
    vllm_grpc_port: int | None = setting(
        None,
        doc="port of vllm.grpc.engine.VllmEngine at the first replica's scheduler, the next port "
        "at the next one; 0 for free ones (default: none)",
        check=between(0, 65_535),
    )
    vllm_grpc_client_stops: bool | None = passed_to(
        "scheduler",
        doc="leave stop strings to clients of vllm.grpc.engine, as smg wants it, and do not refuse "
        "them",
    )
    kv_events_endpoint: str | None = passed_to(
        "scheduler",
        doc="ZMQ endpoint where KV events are published in vLLM's form, such as tcp://*:5557",
    )
    kv_events_replay_endpoint: str | None = passed_to(
        "scheduler", doc="ZMQ endpoint that sends KV events again, such as tcp://*:5558"
    )
    kv_events_topic: str | None = passed_to("scheduler", doc="topic of the KV events")
    kv_events_encoding: str | None = passed_to(
        "scheduler", doc="how KV events are encoded: map, or array as vLLM did before 0.24"
    )
    liveness_timeout_seconds: float = setting(
        2.0,
        doc="time without an answer to health checks after which a service is killed and "
        "restarted; five times that for the gateway",
        check=at_least(0.5),
    )
    worker_niceness: int = setting(
        0,
        doc="niceness of workers, so that the other services get scarce processors first",
        check=between(0, 19),
    )
    otlp_endpoint: str | None = passed_to(
        *EVERY_SERVICE,
        doc="where traces go, an OTLP/gRPC URL such as http://127.0.0.1:4317, besides the gateway, "
        "which keeps the newest for `stepwell trace` and /ui",
    )
    trace_sample_ratio: float | None = passed_to(
        *EVERY_SERVICE,
        doc="share of requests and steps that are traced (default: all for a collector; without "
        "one, 12 requests a minute)",
        check=between(0, 1),
    )
    trace_step_sample_ratio: float | None = passed_to(
        "scheduler",
        doc="share of the engine steps of traced requests that are traced, too (default: 0.01 for "
        "a collector, all without one)",
        check=between(0, 1),
    )
    log_level: LogLevel | None = passed_to(*EVERY_SERVICE, doc="what the services log")
    log_format: LogFormat = passed_to(
        *EVERY_SERVICE,
        doc="how a log line looks: text for people, json for programs",
        default=LogFormat.TEXT,
    )
    quiet: bool = setting(False, doc="print only the ready line and errors")

    @property
    def num_ranks(self) -> int:
        """The number of workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
