"""The setting `speculative_config`: JSON with the names of vLLM's."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_SPECULATIVE_TOKENS = 128
"""Most drafts of a request in a step, as in vLLM."""

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
_NAMES = {NGRAM: ("prompt_lookup_min", "prompt_lookup_max"), DRAFT_MODEL: ("model",)}
"""What each method takes besides what all take."""

_DEFAULT_LOOKUP = 5
_RANGES = {
    "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
    "num_rows": (0, 1_048_576),
    "prompt_lookup_min": (1, 1024),
    "prompt_lookup_max": (1, 1024),
}
_OF_ALL = ("method", "num_speculative_tokens", "num_rows")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are proposed: up to `num_speculative_tokens`, where the last `prompt_lookup_min`
    to `prompt_lookup_max` tokens occurred before, or by the draft model in the directory `model`.
    `num_rows`: that tokens and drafts of decoding requests are to fill in a step, 0 if any number;
    None: as many as the device computes in about the time of one.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    num_rows: int | None = None
    model: Path | None = None

    @property
    def method(self) -> str:
        """Its name in the setting."""
        return NGRAM if self.model is None else DRAFT_MODEL


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The configuration that a text holds. Without a method it is "draft_model" if a model is
    given, else "ngram". Of the two lengths of a match, one that is given sets the other, and both
    are 5 by default. Raises ValueError, which says what is wrong with it.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON ({error})") from None
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object")
    method = given.get("method", DRAFT_MODEL if "model" in given else NGRAM)
    if method not in tuple(_NAMES):
        raise ValueError(f"must have method {' or '.join(_NAMES)}")
    known = (*_OF_ALL, *_NAMES[method])
    if unknown := sorted(given.keys() - set(known)):
        what = f"with method {method} may have only {', '.join(known)}"
        raise ValueError(f"has {unknown[0]!r}, and {what}")
    if "num_speculative_tokens" not in given:
        raise ValueError("must have num_speculative_tokens")
    numbers = {key: _number(key, given[key]) for key in _RANGES if key in given}
    longest = numbers.get("prompt_lookup_max", numbers.get("prompt_lookup_min", _DEFAULT_LOOKUP))
    shortest = numbers.get("prompt_lookup_min", longest)
    if shortest > longest:
        raise ValueError(f"must have prompt_lookup_min of at most prompt_lookup_max {longest}")
    most, num_rows = numbers["num_speculative_tokens"], numbers.get("num_rows")
    model = _model(given) if method == DRAFT_MODEL else None
    return SpeculativeConfig(most, shortest, longest, num_rows, model)


def speculative_config_problem(text: str) -> str | None:
    """What is wrong with a text as `speculative_config`; None if nothing is."""
    try:
        parse_speculative_config(text)
    except ValueError as error:
        return str(error)
    return None


def _number(key: str, value: object) -> int:
    low, high = _RANGES[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"must have {key} from {low} to {high}")
    return value


def _model(given: Mapping[str, object]) -> Path:
    model = given.get("model")
    if not isinstance(model, str) or not Path(model).is_dir():
        raise ValueError(f"must have as model the directory of a draft model, not {model!r}")
    return Path(model)
