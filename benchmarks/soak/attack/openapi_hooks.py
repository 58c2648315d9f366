"""Hooks of schemathesis that bound the answers to generated requests.

An answer of thousands of tokens takes as long to test as a thousand short ones. A deadline that no
answer can meet causes the documented 504, which is no defect.
"""

from collections.abc import Sequence
from typing import Any

import schemathesis

MOST_TOKENS = 4
LEAST_SECONDS = 60.0
_TIMEOUT = "X-Request-Timeout"
_LENGTHS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""The fields that bound an answer's length, by path."""


@schemathesis.hook  # type: ignore[untyped-decorator, unused-ignore]
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Bounds the body and the headers of a request before it is sent."""
    if isinstance(case.body, dict) and case.path in _LENGTHS:
        _bound_answers(case.body, _LENGTHS[case.path])
    if case.headers and _TIMEOUT in case.headers:
        case.headers[_TIMEOUT] = _bounded_seconds(case.headers[_TIMEOUT])


def _bound_answers(body: dict[str, Any], names: Sequence[str]) -> None:
    """Lowers numeric lengths to MOST_TOKENS, and sets the length of requests without one."""
    for name in names:
        value = body.get(name)
        if type(value) is int and value > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if all(body.get(name) is None for name in names):
        body[names[0]] = MOST_TOKENS


def _bounded_seconds(text: str) -> str:
    """Raises a positive number of seconds to LEAST_SECONDS. Other values are unchanged."""
    try:
        seconds = float(text)
    except ValueError:
        return text
    return str(max(seconds, LEAST_SECONDS)) if seconds > 0 else text
