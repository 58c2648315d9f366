"""Hooks of schemathesis: what generated requests for answers are bounded by.

An answer of thousands of tokens takes as long to test as a thousand short ones, and a deadline that
no answer can meet is answered with the 504 that the document names, which is no defect.
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
"""What bounds an answer's length, by path."""


@schemathesis.hook  # type: ignore[untyped-decorator, unused-ignore]
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Bounds the body and the headers of a request before it is sent."""
    if isinstance(case.body, dict) and case.path in _LENGTHS:
        _bound_answers(case.body, _LENGTHS[case.path])
    if case.headers and _TIMEOUT in case.headers:
        case.headers[_TIMEOUT] = _bounded_seconds(case.headers[_TIMEOUT])


def _bound_answers(body: dict[str, Any], names: Sequence[str]) -> None:
    """Lowers lengths that are numbers, and gives one to requests for an answer without one."""
    for name in names:
        value = body.get(name)
        if type(value) is int and value > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if all(body.get(name) is None for name in names):
        body[names[0]] = MOST_TOKENS


def _bounded_seconds(text: str) -> str:
    """A number of seconds that an answer can be made in; what is no number stays as it is."""
    try:
        seconds = float(text)
    except ValueError:
        return text
    return str(max(seconds, LEAST_SECONDS)) if seconds > 0 else text
