"""Reads compose files like `docker compose`: bases extended, files merged, variables replaced."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "deploy" / "compose"
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-?]([^}]*))?\}")


def services_of(*names: str, **variables: str) -> dict[str, dict[str, Any]]:
    """Maps the names of services to their entries in one or more merged compose files."""
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, _load(name, variables)["services"])
    return {name: _extended(service, variables) for name, service in merged.items()}


def _load(name: str, variables: dict[str, str]) -> dict[str, Any]:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1], match[2] or "")

    text = (DIRECTORY / name).read_text()
    loaded: dict[str, Any] = yaml.load(_VARIABLE.sub(value, text), yaml.CSafeLoader)
    return loaded


def _extended(service: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    own = dict(service)
    base = own.pop("extends", None)
    if base is None:
        return own
    return _merge(_load(base["file"], variables)["services"][base["service"]], own)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merges mappings, joins lists except for commands, and replaces other values."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value)
        elif isinstance(old, list) and isinstance(value, list) and key != "command":
            merged[key] = [*old, *value]
        else:
            merged[key] = value
    return merged
