"""Reads the settings of the further models that a gateway serves."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.common.process.settings import SettingError, with_values
from services.gateway.settings import GatewaySettings

_OWN = frozenset(
    {
        "model",
        "served_model_name",
        "schedulers",
        "expected_replicas",
        "lora_modules",
        "lora_dir",
        "generation_config",
        "override_generation_config",
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "reasoning_parser",
        "tool_call_parser",
        "enable_auto_tool_choice",
        "enable_tokenizer_info_endpoint",
    }
)
"""Settings of one model. If its object lacks one, or has null, the model has the default."""
_SHARED = frozenset(
    {
        "max_concurrent_requests",
        "max_num_queued_tokens",
        "routing_policy",
        "routing_max_load_delta",
        "resubmit_timeout_seconds",
        "migrate_after_seconds",
    }
)
"""Settings that a model may have. A model whose object does not have one has the first model's."""


def further_models(settings: GatewaySettings) -> list[GatewaySettings]:
    """Returns the settings of each model in the file `further_models`. All other settings have the
    process's values. Raises SettingError, which names the model's number and the field.
    """
    if settings.further_models is None:
        return []
    models = [
        _model(settings, entry, f"--further-models: [{number}].")
        for number, entry in enumerate(_entries(settings.further_models))
    ]
    names = [name for one in (settings, *models) for name in _names(one)]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise SettingError(f"--further-models: two models have the name {repeated[0]!r}")
    return models


def _entries(path: Path) -> Sequence[Any]:
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"--further-models: {path} cannot be read: {error}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SettingError(f"--further-models: {path} must contain a list of objects")
    return entries


def _model(settings: GatewaySettings, given: dict[str, Any], where: str) -> GatewaySettings:
    entry = {name: value for name, value in given.items() if value is not None}
    if unknown := [name for name in entry if name not in _OWN | _SHARED]:
        raise SettingError(f"{where}{unknown[0]} is not a setting of one model")
    if not entry.get("model"):
        raise SettingError(f"{where}model must be given")
    if not entry.get("schedulers") and settings.redis_url is None:
        raise SettingError(f"{where}schedulers must be given, since there is no --redis-url")
    defaults: dict[str, Any] = {
        field.name: field.default
        for field in dataclasses.fields(settings)
        if field.name in _OWN and field.name != "model"
    }
    # The first model's viewer receives the spans of other services for all models.
    defaults |= {"further_models": None, "trace_address": None}
    of_process = dataclasses.replace(settings, **defaults)
    model = with_values(of_process, entry, where)
    try:
        model.require_tool_call_parser()
    except SettingError as error:
        raise SettingError(f"{where.removesuffix('.')}: {error}") from error
    return model


def _names(settings: GatewaySettings) -> Iterable[str]:
    return settings.model_name, *(entry.partition("=")[0] for entry in settings.lora_modules)
