"""Settings of the gateway."""

from dataclasses import dataclass
from pathlib import Path

from services.common.addresses import is_host_port
from services.common.redis_url import is_redis_url
from services.common.service_settings import ServiceSettings
from services.common.settings import (
    at_least,
    existing_directory,
    not_empty,
    one_of,
    setting,
    with_default,
)
from services.gateway.core.routing import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(ServiceSettings):
    """The edge: OpenAI-compatible HTTP and gRPC in front of one or more schedulers."""

    model: Path = setting(
        doc="model directory; its tokenizer files are read", check=existing_directory
    )
    served_model_name: str = setting(
        "", doc="name by which clients ask for the model; empty: the directory's name"
    )
    generation_config: str = setting(
        "auto",
        doc="where default sampling parameters come from: auto, the model's "
        "generation_config.json; vllm, no file; or a directory with such a file, whose "
        "max_new_tokens bounds every answer",
    )
    schedulers: tuple[str, ...] = setting(
        ("127.0.0.1:9001",), doc="addresses of schedulers, comma-separated", check=not_empty
    )
    redis_url: str | None = setting(
        None,
        doc="Redis in which pools write what they cache, redis://[user:password@]host:port; a "
        "cluster by any of its nodes (default: the pools are asked)",
        check=is_redis_url,
    )
    address: str = with_default(ServiceSettings, "address", "0.0.0.0:9000")
    http_address: str = setting(
        "0.0.0.0:8000",
        doc="where HTTP listens: host:port, with port 0 for a free one",
        check=is_host_port,
    )
    drain_seconds: float = with_default(ServiceSettings, "drain_seconds", 7.0)
    api_keys: tuple[str, ...] = setting(
        (), doc="keys that clients must show one of, comma-separated; empty: no key is asked for"
    )
    max_concurrent_requests: int = setting(
        1024, doc="client requests served at once; further ones get 429", check=at_least(1)
    )
    max_choices_per_request: int = setting(
        256, doc="prompts times n of one request", check=at_least(1)
    )
    max_items_per_request: int = setting(
        131_072,
        doc="values of one request, such as token ids, and tokens in an answer of /tokenize; all "
        "of them are read at once, at some 100 ns each. An answer that is not streamed may hold "
        "32 log-probabilities for each",
        check=at_least(1024),
    )
    max_body_bytes: int = setting(
        4 * 2**20,
        doc="longest HTTP body that is read; messages over gRPC may be half as long. Bodies above "
        "64 KiB that are held at once may take eight times as much; further ones wait",
        check=at_least(1024),
    )
    max_connections: int = setting(
        4096,
        doc="open HTTP connections, and as many of gRPC; idle ones make room for new ones",
        check=at_least(1),
    )
    receive_timeout_seconds: float = setting(
        10.0,
        doc="how long a client may take to send the headers of an HTTP request or a message over "
        "gRPC, or to begin a gRPC connection; a body may take three times as long",
        check=at_least(0.01),
    )
    http_keep_alive_seconds: float = setting(
        65.0, doc="how long an HTTP connection stays open without a request", check=at_least(0.01)
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        doc="names in Host that are answered to, or *; empty: localhost where http_address is a "
        "loopback address, else any. Addresses always are",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        doc="origins of web pages that may read answers, such as https://chat.example, or *; "
        "empty: none (CORS)",
    )
    routing_policy: str = setting(
        "cache-aware",
        doc="how one of several replicas is chosen: cache-aware, least-loaded, round-robin, "
        "consistent-hash or power-of-two",
        check=one_of(POLICIES),
    )
    routing_max_load_delta: int = setting(
        16,
        doc="a replica with so many more requests than the least loaded one gets none, whatever it "
        "has cached (cache-aware)",
        check=at_least(1),
    )
    resubmit_timeout_seconds: float = setting(
        30.0,
        doc="how long a request waits for a replica when none is ready or its own was lost",
        check=at_least(0),
    )
    migrate_after_seconds: float = setting(
        1.0,
        doc="how long a replica may be unable to run steps before its requests go to another one",
        check=at_least(0),
    )
    session_timeout_seconds: float = setting(
        3.0,
        doc="a scheduler that sends nothing for so long hangs: its requests go elsewhere",
        check=at_least(0.1),
    )
    reader_timeout_seconds: float = setting(
        30.0,
        doc="a connection or stream whose client reads nothing of its answer for so long is ended",
        check=at_least(0.1),
    )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name

    @property
    def max_logprobs_per_request(self) -> int:
        """Log-probabilities of an answer that is not streamed, which take 8 bytes each."""
        return 32 * self.max_items_per_request

    @property
    def max_buffered_body_bytes(self) -> int:
        """Bytes of the HTTP bodies above 64 KiB that are held at once."""
        return 8 * self.max_body_bytes

    @property
    def max_message_bytes(self) -> int:
        """The longest message of a gRPC client: numbers take fewer bytes than in JSON."""
        return self.max_body_bytes // 2

    @property
    def body_timeout_seconds(self) -> float:
        """How long the body of an HTTP request may take to arrive."""
        return 3 * self.receive_timeout_seconds
