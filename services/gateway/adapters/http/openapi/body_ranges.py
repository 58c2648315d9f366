"""The ranges of numbers in bodies, for the schemas of bodies. The core checks the ranges."""

from collections.abc import Mapping
from typing import Any

from services.common.request.sampling import RANGES
from services.common.request.sampling_limits import MAX_LOGPROBS
from services.gateway.adapters.http.anthropic.bodies import MessagesBody
from services.gateway.adapters.http.openai.bodies import SamplingBody
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.core.request.request_check import MAX_STOP_STRINGS

_OTHER_THAN_CLIENTS = {"seed", "top_k"}
"""Parameters whose range is wider in bodies than in the core, because clients may send negative
numbers.
"""

_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}

_LIMITS: dict[str, Mapping[str, float]] = {
    **{
        name: {"minimum": low, "maximum": high}
        for name, (low, high) in RANGES.items()
        if name not in _OTHER_THAN_CLIENTS
    },
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": RANGES["top_k"][1]},
    "n": {"minimum": 1},
    "best_of": {"minimum": 1},
    "max_tokens": {"minimum": 0},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "stop": {"maxItems": MAX_STOP_STRINGS},
    "stop_sequences": {"maxItems": MAX_STOP_STRINGS},
}
"""Maps fields to keywords of JSON Schema. Each keyword applies only to values of its type, so null
and booleans are not restricted.
"""


def add_ranges(schema: dict[str, Any]) -> None:
    """Adds the ranges of fields to the schema of a request for generation."""
    for name, limits in _LIMITS.items():
        if name in schema["properties"]:
            known = schema["properties"][name]
            known.update({key: value for key, value in limits.items() if key not in known})


def generates(model: type) -> bool:
    return issubclass(model, SamplingBody | MessagesBody | ResponsesBody)
