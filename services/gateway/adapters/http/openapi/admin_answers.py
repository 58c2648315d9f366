"""The bodies of answers to operators' calls, for the OpenAPI document of their address."""

from typing import Any

from services.gateway.adapters.http.openapi.answers import Answer, ErrorDetail
from services.gateway.adapters.http.openapi.server_answers import ReplicaStatus, Status


class ReplicaAnswer(Answer):
    """What one replica said: whether it did what was asked, or else why not."""

    address: str
    ok: bool
    error: ErrorDetail | None = None
    is_paused: bool | None = None
    num_unfinished: int | None = None


class Done(Answer):
    """Every replica that was asked did it."""

    status: str
    replicas: list[ReplicaAnswer]


class IsPaused(Answer):
    """Whether every replica that was asked is paused."""

    is_paused: bool
    replicas: list[ReplicaAnswer]


class Failed(Answer):
    """Some replicas did not do what was asked; those with `ok` did."""

    error: ErrorDetail
    replicas: list[ReplicaAnswer]


class ServerInfo(Status):
    """The gateway and its replicas."""

    version: str
    settings: dict[str, Any]
    replicas: list[ReplicaStatus]
