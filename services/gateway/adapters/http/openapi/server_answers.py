"""Answers of the routes about the server: its tokenizer, models, replicas and health."""

from typing import Any, Literal

from pydantic import ConfigDict

from services.gateway.adapters.http.openapi.answers import Answer


class Tokens(Answer):
    """An answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    """An answer of /detokenize."""

    prompt: str


class TokenizerInfo(Answer):
    """An answer of /tokenizer_info: all entries of tokenizer_config.json."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | dict[str, str] | None = None


class ModelCard(Answer):
    """A model or an adapter. `max_model_len` is null while no replica is ready. `root` is the
    directory of an adapter, and `parent` is the adapter's base model.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    root: str | None = None
    parent: str | None = None


class ModelList(Answer):
    """An answer of /v1/models: the served models."""

    object: Literal["list"]
    data: list[ModelCard]


class ReplicaStatus(Answer):
    """What this gateway knows about a replica. `stats` are the statistics of the replica's
    scheduler.
    """

    address: str
    model: str
    fingerprint: str
    ready: bool
    reason: str
    unfinished_here: int
    stats: dict[str, Any] | None


class Status(Answer):
    """An answer of /status."""

    model: str
    draining: bool
    requests_in_flight: int
    sequences_without_replica: int
    replicas: list[ReplicaStatus]


class Healthy(Answer):
    """An answer of /health if requests can be served. `not_ready` maps the address of each unready
    replica to the reason.
    """

    status: Literal["ok"]
    not_ready: dict[str, str]


class Unhealthy(Answer):
    """An answer of /health if no request can be served."""

    status: Literal["unavailable"]
    reason: str


class Version(Answer):
    """An answer of /version."""

    version: str


class Load(Answer):
    """An answer of /load: the number of requests that are being served."""

    server_load: int
