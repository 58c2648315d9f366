"""The setting `speculative_config`: JSON with the names of vLLM's."""

import json
from dataclasses import dataclass

MAX_SPECULATIVE_TOKENS = 128
"""Most drafts of a request in a step, as in vLLM."""

_METHODS = ("ngram",)
_DEFAULT_LOOKUP = 5
_RANGES = {
    "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
    "prompt_lookup_min": (1, 1024),
    "prompt_lookup_max": (1, 1024),
    "num_rows": (0, 1_048_576),
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are proposed: up to `num_speculative_tokens`, where the last `prompt_lookup_min`
    to `prompt_lookup_max` tokens occurred before. `num_rows`: that tokens and drafts of decoding
    requests are to fill in a step, 0 if any number; None: as many as the device computes in about
    the time of one.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    num_rows: int | None = None
    method: str = "ngram"


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """The configuration that a text holds. Of the two lengths of a match, one that is given sets
    the other, and both are 5 by default. Raises ValueError, which says what is wrong with it.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON ({error})") from None
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object")
    known = ("method", *_RANGES)
    if unknown := sorted(given.keys() - set(known)):
        raise ValueError(f"has {unknown[0]!r}, and may have only {', '.join(known)}")
    if given.get("method", "ngram") not in _METHODS:
        raise ValueError(f"must have method {' or '.join(_METHODS)}")
    if "num_speculative_tokens" not in given:
        raise ValueError("must have num_speculative_tokens")
    numbers = {key: _number(key, given[key]) for key in _RANGES if key in given}
    longest = numbers.get("prompt_lookup_max", numbers.get("prompt_lookup_min", _DEFAULT_LOOKUP))
    shortest = numbers.get("prompt_lookup_min", longest)
    if shortest > longest:
        raise ValueError(f"must have prompt_lookup_min of at most prompt_lookup_max {longest}")
    most, num_rows = numbers["num_speculative_tokens"], numbers.get("num_rows")
    return SpeculativeConfig(most, shortest, longest, num_rows)


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
