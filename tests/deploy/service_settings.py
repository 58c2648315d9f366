"""The settings of each service, from their declarations."""

import dataclasses
import enum
import typing
from typing import Any

from services.common.process.service_settings import ServiceSettings
from services.common.process.settings import without_none
from services.gateway.settings import GatewaySettings
from services.kvpool.settings import KVPoolSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "kvpool": KVPoolSettings,
    "worker": WorkerSettings,
}

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}


def json_schemas(service: str) -> dict[str, Any]:
    """Maps the settings of a service to their JSON schemas."""
    cls = SETTINGS[service]
    hints = typing.get_type_hints(cls)
    return {
        field.name: _schema(without_none(hints[field.name])) for field in dataclasses.fields(cls)
    }


def _schema(hint: Any) -> dict[str, Any]:
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": _schema(typing.get_args(hint)[0])}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    return {"type": _JSON_TYPES.get(hint, "string")}
