"""The bodies of answers to operators' calls, for the operators' OpenAPI document."""

from typing import Any

from services.gateway.adapters.http.openapi.answers import Answer, ErrorDetail
from services.gateway.adapters.http.openapi.server_answers import ReplicaStatus, Status


class ReplicaAnswer(Answer):
    """The result of an operator's call at one replica: success, or the error."""

    address: str
    ok: bool
    error: ErrorDetail | None = None
    is_paused: bool | None = None
    num_unfinished: int | None = None


class Done(Answer):
    """The answer if every replica that was called succeeded."""

    status: str
    replicas: list[ReplicaAnswer]


class IsPaused(Answer):
    """The answer of /is_paused: whether every replica that was called is paused."""

    is_paused: bool
    replicas: list[ReplicaAnswer]


class Failed(Answer):
    """The answer if some replicas failed. The replicas with `ok` succeeded."""

    error: ErrorDetail
    replicas: list[ReplicaAnswer]


class ServerInfo(Status):
    """An answer of /server_info: the gateway's version and settings, and its replicas."""

    version: str
    settings: dict[str, Any]
    replicas: list[ReplicaStatus]
