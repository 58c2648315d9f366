"""The setting `speculative_config`: JSON with vLLM's names."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.model_source.find import find_model
from services.worker.backends.suffix_decoding import SuffixRules

MAX_SPECULATIVE_TOKENS = 128
"""Upper limit of the setting `num_speculative_tokens`, as in vLLM."""

NGRAM, DRAFT_MODEL, SUFFIX = "ngram", "draft_model", "suffix"
_TREE_DEPTH = "suffix_decoding_max_tree_depth"
_CACHED_REQUESTS = "suffix_decoding_max_cached_requests"
_SPEC_FACTOR, _TOKEN_PROB = "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"
_NAMES = {
    NGRAM: ("prompt_lookup_min", "prompt_lookup_max"),
    DRAFT_MODEL: ("model",),
    SUFFIX: (_TREE_DEPTH, _CACHED_REQUESTS, _SPEC_FACTOR, _TOKEN_PROB),
}
"""The keys that only one method allows, by method."""

_DEFAULT_LOOKUP = 5
_DEFAULT_SUFFIX = SuffixRules(
    max_tree_depth=24, max_cached_requests=10_000, max_spec_factor=1.0, min_token_prob=0.1
)
_RANGES: Mapping[str, tuple[float, float]] = {
    "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
    "num_rows": (0, 1_048_576),
    "prompt_lookup_min": (1, 1024),
    "prompt_lookup_max": (1, 1024),
    _TREE_DEPTH: (2, 1024),
    _CACHED_REQUESTS: (0, 1_048_576),
    _SPEC_FACTOR: (0.01, 1024),
    _TOKEN_PROB: (0, 1),
}
_OF_ALL = ("method", "num_speculative_tokens", "num_rows")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are proposed: by a draft model, by suffix trees, or from n-grams, by finding an
    earlier occurrence of the last tokens.
    """

    num_speculative_tokens: int
    """Maximum number of drafts of a request in a step."""
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    """For n-grams: minimum number of last tokens that must match an earlier occurrence."""
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    """For n-grams: maximum number of last tokens that are matched."""
    num_rows: int | None = None
    """Limit on the tokens of decoding requests in a step, including drafts. 0: unlimited. None: as
    many as the device computes in about the time of one.
    """
    model: Path | None = None
    """The directory of the draft model, or None for other methods."""
    suffix: SuffixRules | None = None
    """The rules of suffix trees, or None for other methods."""

    @property
    def method(self) -> str:
        if self.suffix is not None:
            return SUFFIX
        return NGRAM if self.model is None else DRAFT_MODEL


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parses the setting. Raises a ValueError that describes the problem.

    The default method is "draft_model" if a model is given, else "ngram". If only one of the two
    n-gram lengths is given, the other is equal to it. If none is given, both are 5. With suffix
    trees, the default of `num_speculative_tokens` is the trees' depth.
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
    if "num_speculative_tokens" not in given and method != SUFFIX:
        raise ValueError("must have num_speculative_tokens")
    num_rows = _integer(given, "num_rows", 0) if "num_rows" in given else None
    if method == SUFFIX:
        rules = _suffix_rules(given)
        most = min(rules.max_tree_depth, MAX_SPECULATIVE_TOKENS)
        most = _integer(given, "num_speculative_tokens", most)
        return SpeculativeConfig(most, num_rows=num_rows, suffix=rules)
    most = _integer(given, "num_speculative_tokens", MAX_SPECULATIVE_TOKENS)
    if method == DRAFT_MODEL:
        return SpeculativeConfig(most, num_rows=num_rows, model=_model(given))
    shortest = _integer(given, "prompt_lookup_min", _DEFAULT_LOOKUP)
    longest = _integer(given, "prompt_lookup_max", shortest)
    shortest = _integer(given, "prompt_lookup_min", longest)
    if shortest > longest:
        raise ValueError(f"must have prompt_lookup_min of at most prompt_lookup_max {longest}")
    return SpeculativeConfig(most, shortest, longest, num_rows)


def speculative_config_problem(text: str) -> str | None:
    """The problem of an invalid `speculative_config`, or None."""
    try:
        parse_speculative_config(text)
    except ValueError as error:
        return str(error)
    return None


def _suffix_rules(given: Mapping[str, object]) -> SuffixRules:
    default = _DEFAULT_SUFFIX
    return SuffixRules(
        _integer(given, _TREE_DEPTH, default.max_tree_depth),
        _integer(given, _CACHED_REQUESTS, default.max_cached_requests),
        _number(given, _SPEC_FACTOR, default.max_spec_factor),
        _number(given, _TOKEN_PROB, default.min_token_prob),
    )


def _integer(given: Mapping[str, object], key: str, default: int) -> int:
    value = given.get(key, default)
    if not isinstance(value, int):
        raise ValueError(_range_of(key))
    return int(_number(given, key, default))


def _number(given: Mapping[str, object], key: str, default: float) -> float:
    value, (low, high) = given.get(key, default), _RANGES[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(_range_of(key))
    return value


def _range_of(key: str) -> str:
    low, high = _RANGES[key]
    return f"must have {key} from {low} to {high}"


def _model(given: Mapping[str, object]) -> Path:
    model = given.get("model")
    if not isinstance(model, str):
        raise ValueError(f"must have the directory of a draft model as model, not {model!r}")
    return find_model(model)
