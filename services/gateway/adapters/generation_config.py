"""Sampling defaults from a model's generation_config.json, as vLLM takes them from it."""

import json
import logging
from pathlib import Path
from typing import Any

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.sampling import SamplingParams
from services.common.sampling_limits import check_sampling
from services.gateway.core.sampling_defaults import SamplingDefaults

AUTO, VLLM = "auto", "vllm"
_FILE = "generation_config.json"
_HUGE = 10**300
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")

logger = logging.getLogger(__name__)


def read_sampling_defaults(setting: str, model: Path) -> SamplingDefaults:
    """What the setting `generation_config` asks for.

    "auto" reads the file of the model directory, where there is one; "vllm" reads none; anything
    else is a directory whose file is read, and in which `max_new_tokens` bounds every answer.
    Raises FailedPrecondition, in one sentence, for a file that is missing or wrong.
    """
    if setting == VLLM:
        return SamplingDefaults()
    path = (model if setting == AUTO else Path(setting)) / _FILE
    if setting == AUTO and not path.exists():
        return SamplingDefaults()
    values = _read(path)
    given: dict[str, Any] = {
        name: _number(path, values, name) for name in _NUMBERS if name in values
    }
    if "top_k" in values:
        top_k = _whole(path, values, "top_k", least=-1)
        given["top_k"] = max(top_k, 0)
    longest = (
        _whole(path, values, "max_new_tokens", least=1) if "max_new_tokens" in values else None
    )
    sampling = SamplingParams(**given)
    try:
        check_sampling(sampling, vocab_size=1)  # it names no token
    except InvalidArgument as error:
        raise FailedPrecondition(f"{path}: {error.message}") from error
    if given or longest is not None:
        lengths = {} if longest is None else {"max_tokens": longest}
        listed = ", ".join(f"{name} {value}" for name, value in (given | lengths).items())
        logger.info("parameters that clients leave out: %s (%s)", listed, path)
    return SamplingDefaults(sampling, longest, None if setting == AUTO else longest)


def _read(path: Path) -> dict[str, Any]:
    """The file's values but for those that are null."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise FailedPrecondition(f"{path}: the file cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FailedPrecondition(f"{path}: the file is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise FailedPrecondition(f"{path}: the file must hold a JSON object")
    return {name: value for name, value in values.items() if value is not None}


def _number(path: Path, values: dict[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _HUGE:
        raise FailedPrecondition(f"{path}: {name} must be a number, not {str(value)[:40]}")
    return float(value)


def _whole(path: Path, values: dict[str, Any], name: str, *, least: int) -> int:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FailedPrecondition(
            f"{path}: {name} must be a whole number of {least} or more, not {value!r}"
        )
    return value
