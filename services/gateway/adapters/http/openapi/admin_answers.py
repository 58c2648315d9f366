"""The bodies of answers to operators' calls, for the operators' OpenAPI document."""

from typing import Any

from services.gateway.adapters.http.openapi.answers import Answer, ErrorDetail
from services.gateway.adapters.http.openapi.server_answers import ReplicaStatus, Status


class ReplicaAnswer(Answer):
    """The result of one replica: success, or its error."""

    address: str
    ok: bool
    error: ErrorDetail | None = None
    is_paused: bool | None = None
    num_unfinished: int | None = None


class Done(Answer):
    """Every replica that was called succeeded."""

    status: str
    replicas: list[ReplicaAnswer]


class IsPaused(Answer):
    """Whether every replica that was called is paused."""

    is_paused: bool
    replicas: list[ReplicaAnswer]


class Failed(Answer):
    """Some replicas failed; the replicas with `ok` succeeded."""

    error: ErrorDetail
    replicas: list[ReplicaAnswer]


class ServerInfo(Status):
    """The gateway and its replicas."""

    version: str
    settings: dict[str, Any]
    replicas: list[ReplicaStatus]
