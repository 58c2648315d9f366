"""Sampling defaults from a model's generation_config.json, by vLLM's rules."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.request.sampling import SamplingParams
from services.common.request.sampling_limits import check_sampling
from services.gateway.core.request.sampling_defaults import SamplingDefaults

AUTO, VLLM = "auto", "vllm"
_FILE = "generation_config.json"
_OVERRIDE = "--override-generation-config"
_LONGEST = "max_new_tokens"
_HUGE = 10**300
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")

logger = logging.getLogger(__name__)


def read_sampling_defaults(
    setting: str, model: Path, override: Mapping[str, Any] | None = None
) -> SamplingDefaults:
    """Returns the defaults that the settings `generation_config` and `override_generation_config`
    determine.

    If `setting` is "auto", the file in the model directory is read if it exists. If it is "vllm",
    no file is read. Any other value is the path of a directory that has the file. Values of
    `override` replace values of the file. `max_new_tokens` is an upper bound for every answer if it
    is in `override` or in the file of such a directory, and only a default in the model's own file.

    Raises FailedPrecondition if the file is missing or invalid, or if the override is invalid.
    """
    path = (model if setting == AUTO else Path(setting)) / _FILE
    has_file = setting != VLLM and (setting != AUTO or path.exists())
    told, bound = _defaults(path, _read(path)) if has_file else ({}, None)
    changes, most = _defaults(_OVERRIDE, _known_only(override or {}))
    given, longest = told | changes, bound if most is None else most
    if given or longest is not None:
        lengths = {} if longest is None else {"max_tokens": longest}
        listed = ", ".join(f"{name} {value}" for name, value in (given | lengths).items())
        sources = [str(path)] * has_file + [_OVERRIDE] * bool(override)
        logger.info("parameters that clients leave out: %s (%s)", listed, ", ".join(sources))
    bounds_all = most is not None or setting != AUTO
    return SamplingDefaults(SamplingParams(**given), longest, longest if bounds_all else None)


def _defaults(source: Path | str, values: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    given: dict[str, Any] = {
        name: _number(source, values, name) for name in _NUMBERS if name in values
    }
    if "top_k" in values:
        top_k = _whole(source, values, "top_k", least=-1)
        given["top_k"] = max(top_k, 0)
    try:
        check_sampling(SamplingParams(**given), vocab_size=1)  # any size: there are no token ids
    except InvalidArgument as error:
        raise FailedPrecondition(f"{source}: {error.message}") from error
    has_length = _LONGEST in values
    return given, _whole(source, values, _LONGEST, least=1) if has_length else None


def _known_only(override: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of an override, without nulls. Raises FailedPrecondition for an unknown
    name, because its value would have no effect.
    """
    known = (*_NUMBERS, "top_k", _LONGEST)
    for name in override:
        if name not in known:
            raise FailedPrecondition(
                f"{_OVERRIDE}: {name[:40]} is not read; it may have {', '.join(known)}"
            )
    return {name: value for name, value in override.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise FailedPrecondition(f"{path}: the file cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FailedPrecondition(f"{path}: the file is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise FailedPrecondition(f"{path}: the file must hold a JSON object")
    return {name: value for name, value in values.items() if value is not None}


def _number(source: Path | str, values: dict[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _HUGE:
        raise FailedPrecondition(f"{source}: {name} must be a number, not {str(value)[:40]}")
    return float(value)


def _whole(source: Path | str, values: dict[str, Any], name: str, *, least: int) -> int:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FailedPrecondition(
            f"{source}: {name} must be a whole number of {least} or more, not {value!r}"
        )
    return value
