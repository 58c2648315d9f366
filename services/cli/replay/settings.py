"""Reads the scheduler's configuration from logs and from `--set`. Checks types and ranges."""

import dataclasses
import typing
from contextlib import suppress
from enum import Enum
from typing import Any

from services.cli.replay.fields import Field
from services.common.process.settings import without_none
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies import check_policy

MAX_BLOCKS = 2_000_000
_MAX_SEQS = 1_000_000

RANGES: dict[str, tuple[float, float]] = {
    "max_num_seqs": (1, _MAX_SEQS),
    "max_num_batched_tokens": (1, 10**9),
    "max_model_len": (2, 10**9),
    "block_size": (1, 10**6),
    "num_blocks": (2, MAX_BLOCKS),
    "long_prefill_token_threshold": (0, 10**9),
    "max_num_scheduled_tokens": (1, 10**9),
    "max_num_active_seqs": (1, _MAX_SEQS),
    "max_loras": (1, _MAX_SEQS),
    "encoder_compute_budget": (0, 10**9),
    "encoder_cache_size": (0, 10**9),
    "num_speculative_tokens": (0, 1000),
    "num_speculative_rows": (0, 10**6),
    "num_lookahead_tokens": (0, 1000),
    "watermark": (0, 1),
    "prefill_schedule_interval": (1, 10**6),
    "program_idle_seconds": (0, 10**9),
    "max_num_programs": (1, 10**9),
    "retention_headroom": (0, 0.5),
    "aging_interval": (1, 10**9),
    "max_warm_admissions": (1, 10**9),
    "pipeline_parallel_size": (1, 1024),
    "prefix_match_unit": (1, 10**6),
    "prefix_cache_retention_interval": (0, 10**9),
}
_HINTS = typing.get_type_hints(SchedulerConfig)
NAMES = tuple(
    field.name
    for field in dataclasses.fields(SchedulerConfig)
    if field.name not in ("fingerprint", "groups")
)


def read_config(field: Field, fingerprint: bytes = b"") -> SchedulerConfig:
    """Reads a configuration. Settings that have defaults may be missing. Raises FieldError."""
    field.only(NAMES)
    values: dict[str, Any] = {"fingerprint": fingerprint}
    for spec in dataclasses.fields(SchedulerConfig):
        has_default = spec.default is not dataclasses.MISSING
        if spec.name in NAMES and not (has_default and spec.name not in field.members()):
            values[spec.name] = read_setting(spec.name, field[spec.name])
    return SchedulerConfig(**values)


def read_setting(name: str, field: Field) -> Any:
    """Reads one setting with its type and range. Raises FieldError."""
    hint = _HINTS[name]
    if field.value is None and without_none(hint) is not hint:
        return None
    hint = without_none(hint)
    if name == "policy":
        if complaint := check_policy(field.text()):
            raise field.wrong(complaint)
        return field.value
    if issubclass(hint, Enum):
        return field.member(hint)
    if hint is bool:
        return field.boolean()
    low, high = RANGES[name]
    return field.number(low, high) if hint is float else field.integer(int(low), int(high))


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `NAME=VALUE` into a setting's name and value. Raises ValueError with one sentence."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: say NAME=VALUE")
    if name not in NAMES:
        raise ValueError(
            f"--set {text}: there is no setting {name!r}; there are {', '.join(NAMES)}"
        )
    try:
        return name, read_setting(name, Field(_plain_value(value), (name,)))
    except ValueError as error:
        raise ValueError(f"--set {error}") from None


def _plain_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        return float(text)
    return text
