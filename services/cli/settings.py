"""Settings of `stepwell up`.

What belongs to a service has no default here: left alone, the service's own default or its own
environment variable (STEPWELL_WORKER_..., STEPWELL_SCHEDULER_...) holds.
"""

from dataclasses import dataclass
from pathlib import Path

from services.common.logs import LogFormat, LogLevel
from services.common.settings import at_least, between, setting


@dataclass(frozen=True, slots=True)
class UpSettings:
    """Starts gateway, scheduler, kvpool and worker, and serves a model."""

    model: Path = setting(doc="directory of the model, in Hugging Face format")
    host: str = setting("127.0.0.1", doc="address to listen on; 0.0.0.0 for every one")
    http_port: int = setting(
        8000, doc="port of the OpenAI-compatible API; 0 for a free one", check=between(0, 65_535)
    )
    grpc_port: int = setting(
        9000, doc="port of the gRPC API; 0 for a free one", check=between(0, 65_535)
    )
    served_model_name: str | None = setting(
        None, doc="name that clients use (default: the directory's)"
    )
    generation_config: str | None = setting(
        None,
        doc="where default sampling parameters come from: auto, vllm, or a directory with a "
        "generation_config.json",
    )
    api_keys: tuple[str, ...] | None = setting(None, doc="keys that clients must show one of")
    dtype: str | None = setting(
        None, doc="data type of weights and KV cache: auto, float32, bfloat16"
    )
    device: str | None = setting(None, doc="what the worker computes on: auto, cpu, cuda")
    gpu_memory_utilization: float | None = setting(
        None, doc="share of the GPU's memory that the worker may use", check=between(0.01, 1)
    )
    tensor_parallel_size: int = setting(
        1, doc="workers that share the model, each a rank of it", check=between(1, 64)
    )
    num_threads: int | None = setting(
        None,
        doc="threads that each worker computes with (default: its share of the cores)",
        check=at_least(1),
    )
    batch_invariant: bool | None = setting(
        None,
        doc="compute a request the same bit for bit in any batch (default: on the CPU yes, on CUDA "
        "no)",
    )
    kv_cache_memory_bytes: int | None = setting(
        None, doc="memory of the KV cache", check=at_least(1)
    )
    num_blocks: int | None = setting(
        None, doc="blocks of the KV cache, instead of its memory", check=at_least(2)
    )
    block_size: int | None = setting(None, doc="tokens per block", check=at_least(1))
    max_model_len: int | None = setting(
        None, doc="longest sequence, prompt and output together, in tokens", check=at_least(2)
    )
    max_num_seqs: int | None = setting(None, doc="requests that run at once", check=at_least(1))
    max_num_batched_tokens: int | None = setting(
        None, doc="token budget of a step", check=at_least(1)
    )
    policy: str | None = setting(None, doc="who waits less: fcfs or priority")
    enable_prefix_caching: bool | None = setting(None, doc="reuse what prompts have in common")
    liveness_timeout_seconds: float = setting(
        2.0,
        doc="a service that answers no health check for so long is killed and started again; the "
        "gateway, with which clients' streams end, gets five times as long",
        check=at_least(0.5),
    )
    otlp_endpoint: str | None = setting(
        None, doc="where traces go, an OTLP/gRPC URL such as http://127.0.0.1:4317"
    )
    trace_sample_ratio: float | None = setting(
        None, doc="share of requests and steps that are traced", check=between(0, 1)
    )
    log_level: LogLevel | None = setting(None, doc="what the services log")
    log_format: LogFormat = setting(
        LogFormat.TEXT, doc="how a log line looks: text for people, json for programs"
    )
    quiet: bool = setting(False, doc="show only the ready line and what goes wrong")
