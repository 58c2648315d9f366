"""Settings of the gateway."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.model_source.find import find_model_files, model_name
from services.common.process.service_settings import ServiceSettings, server_name
from services.common.process.settings import (
    SettingError,
    at_least,
    between,
    existing_directory,
    existing_file,
    one_of,
    setting,
    with_default,
)
from services.common.redis.url import is_redis_url
from services.common.rpc.addresses import (
    DNS,
    is_dns_address,
    is_host_port,
    is_listen_address,
    is_on_this_machine,
)
from services.gateway.client_settings import ClientSettings
from services.gateway.core.fleet.routing import check_policy
from services.gateway.core.text.parsing.catalog import REASONING_FORMATS, TOOL_FORMATS
from services.gateway.options.listed import OptionSettings

DEFAULT_SCHEDULERS = ("127.0.0.1:9001",)


def _are_schedulers(addresses: tuple[str, ...]) -> str | None:
    for address in addresses:
        check = is_dns_address if address.startswith(DNS) else is_listen_address
        if check(address) is not None:
            return "must be host:port, unix:PATH or dns:NAME:PORT each"
    return None


def _are_named_paths(entries: tuple[str, ...]) -> str | None:
    names = [entry.partition("=")[0] for entry in entries]
    if not all(entry.partition("=")[0] and entry.partition("=")[2] for entry in entries):
        return "must be name=path each"
    return "must not give a name twice" if len(set(names)) < len(names) else None


def _json_object(text: str | None) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text or "{}")
    return value


def _is_json_object(text: str) -> str | None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        is_object = False
    return None if is_object else "must be a JSON object"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(ClientSettings, OptionSettings):
    """The gateway: OpenAI-compatible HTTP and gRPC in front of one or more schedulers."""

    model: Path = setting(
        doc="directory of the model, GGUF file, or name on the hub; tokenizer files are read",
        read=find_model_files,
    )
    served_model_name: str = setting(
        "", doc="clients' name of the model (default: the name on the hub, or the directory's)"
    )
    further_models: Path | None = setting(
        None,
        doc="JSON file with a list of further models that this gateway serves, each an object of "
        "the model's own settings, such as model and reasoning_parser",
        check=existing_file,
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        doc="LoRA adapters in PEFT's format, each as name=path. Workers need the same paths and "
        "--enable-lora",
        check=_are_named_paths,
    )
    lora_dir: Path | None = setting(
        None,
        doc="directory from which operators may load adapters, by /v1/load_lora_adapter at "
        "--admin-address",
        check=existing_directory,
    )
    generation_config: str = setting(
        "auto",
        doc="source of default sampling parameters: auto, the model's generation_config.json; "
        "vllm, none; or a directory with that file, whose max_new_tokens bounds every answer",
    )
    chat_template_content_format: str = setting(
        "auto",
        doc="content of a turn in the chat template: string; openai, a list of parts; auto, parts"
        " if the template loops over them",
        check=one_of(("auto", "string", "openai")),
    )
    override_generation_config: str | None = setting(
        None,
        doc="JSON object of defaults that replace generation_config's: temperature, top_p, top_k,"
        " min_p, repetition_penalty, max_new_tokens (bounds every answer)",
        check=_is_json_object,
    )
    chat_template: str | None = setting(
        None, doc="chat template that replaces the model's: a file, or the text of a template"
    )
    default_chat_template_kwargs: str | None = setting(
        None,
        doc='JSON object of chat template variables, such as {"enable_thinking": false}; a '
        "request's chat_template_kwargs override them",
        check=_is_json_object,
    )
    reasoning_parser: str = setting(
        "",
        doc="how the model marks its reasoning, which chats return separately: "
        + ", ".join(REASONING_FORMATS)
        + "; empty: reasoning is content",
        check=one_of(("", *REASONING_FORMATS)),
    )
    tool_call_parser: str = setting(
        "",
        doc="how the model writes calls of tools: "
        + ", ".join(TOOL_FORMATS)
        + "; empty: it calls only where a grammar makes it",
        check=one_of(("", *TOOL_FORMATS)),
    )
    enable_auto_tool_choice: bool = setting(
        False, doc="let the model choose to call tools, in the format of tool_call_parser"
    )
    enable_tokenizer_info_endpoint: bool = setting(
        False, doc="serve the tokenizer's configuration and chat template at /tokenizer_info"
    )
    schedulers: tuple[str, ...] | None = setting(
        None,
        doc="schedulers' addresses, comma-separated: host:port, unix:PATH, or dns:NAME:PORT, "
        "resolved every 3 s (default: 127.0.0.1:9001; with redis_url only registered ones)",
        check=_are_schedulers,
    )
    expected_replicas: int | None = setting(
        None,
        doc="ready replicas that the alert StepwellFewerReplicas expects (default: as many as were "
        "ready in the last hour); 0: an autoscaler may stop all replicas, which is no alert",
        check=at_least(0),
    )
    redis_url: str | None = setting(
        None,
        doc="Redis with the registry of schedulers, cached prefixes, and what gateways share: "
        "redis://[user:password@]host:port, or rediss://host:port?ssl_ca_certs=PATH; "
        "any node of a cluster (default: none)",
        check=is_redis_url,
        is_secret=True,
    )
    address: str = with_default(ServiceSettings, "address", "0.0.0.0:9000")
    http_address: str = setting(
        "0.0.0.0:8000", doc="where HTTP listens: host:port (port 0: a free one)", check=is_host_port
    )
    admin_address: str | None = setting(
        None,
        doc="where operators' calls such as /pause are served over HTTP: host:port or unix:PATH "
        "(default: nowhere)",
        check=is_listen_address,
    )
    admin_key: str | None = setting(
        None,
        doc="key for operators' calls; optional if admin_address is a loopback address or a Unix "
        "socket",
        is_secret=True,
    )
    metrics_address: str | None = setting(
        None,
        doc="host:port of all Prometheus metrics (default: clients read them at /metrics, without"
        " tenants' metrics if keys are required)",
        check=is_host_port,
    )
    tls_cert_file: Path | None = setting(
        None,
        doc="certificate chain (PEM) for clients over HTTP and gRPC (default: no TLS)",
        check=existing_file,
    )
    tls_key_file: Path | None = setting(
        None, doc="key of that certificate (PEM)", check=existing_file
    )
    tls_client_ca_file: Path | None = setting(
        None,
        doc="authorities (PEM) of clients' certificates (default: clients need no certificate)",
        check=existing_file,
    )
    internal_tls_server_name: str | None = server_name()
    drain_seconds: float = with_default(ServiceSettings, "drain_seconds", 7.0)
    drain_delay_seconds: float = setting(
        0.0,
        doc="time after SIGTERM for which new requests are still accepted although health is not "
        "ready, so that load balancers notice",
        check=between(0, 3600),
    )
    access_log: bool = setting(True, doc="log a line for each call of a client, at level info")
    trace_slowest_per_minute: int = setting(
        3,
        doc="number of the slowest requests of each minute that are traced although not sampled; "
        "0: none",
        check=between(0, 100),
    )
    trace_slow_seconds: float = setting(
        30.0,
        doc="requests of this time or longer, and failed ones, are traced although not sampled, 30 "
        "of each a minute; 0: only failed ones",
        check=at_least(0),
    )
    routing_policy: str = setting(
        "cache-aware",
        doc="choice of a replica: cache-aware, least-loaded, round-robin, consistent-hash, "
        "power-of-two or package.module:Class",
        check=check_policy,
    )
    routing_max_load_delta: int = setting(
        16,
        doc="cache-aware: a replica gets no further request if it has more than this many requests "
        "above the least loaded replica",
        check=at_least(1),
    )
    resubmit_timeout_seconds: float = setting(
        30.0,
        doc="time for which a request waits if no replica is ready, or after its replica was lost",
        check=at_least(0),
    )
    migrate_after_seconds: float = setting(
        1.0,
        doc="time after which the requests of a replica that cannot run steps move to another "
        "replica",
        check=at_least(0),
    )
    session_timeout_seconds: float = setting(
        3.0,
        doc="time without a message after which a scheduler counts as hung, and its requests move "
        "to another replica",
        check=at_least(0.1),
    )

    def require_admin_key(self) -> None:
        """Raises SettingError if other machines can reach operators' calls without a key."""
        address = self.admin_address
        if address is not None and not self.admin_key and not is_on_this_machine(address):
            raise SettingError(
                f"--admin-key must be given: other machines reach --admin-address {address}"
            )

    def require_tool_call_parser(self) -> None:
        """Raises SettingError if automatic tool calls are enabled without a parser."""
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise SettingError("--enable-auto-tool-choice needs --tool-call-parser")

    @property
    def model_name(self) -> str:
        return self.served_model_name or model_name(self.model)

    @property
    def known_schedulers(self) -> tuple[str, ...]:
        """Returns the addresses of schedulers in the settings. Raises SettingError if the settings
        contain neither addresses nor the URL of Redis, where schedulers are registered.
        """
        if self.schedulers is None:
            return DEFAULT_SCHEDULERS if self.redis_url is None else ()
        if not self.schedulers and self.redis_url is None:
            raise SettingError("--schedulers must name at least one, or --redis-url be given")
        return self.schedulers

    @property
    def generation_overrides(self) -> dict[str, Any]:
        """Returns the operator's defaults for sampling parameters."""
        return _json_object(self.override_generation_config)

    @property
    def chat_template_variables(self) -> dict[str, Any]:
        """Returns variables for the chat template. A request may override them."""
        return _json_object(self.default_chat_template_kwargs)
