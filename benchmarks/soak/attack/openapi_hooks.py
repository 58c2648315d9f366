"""Hooks of schemathesis that limit the answers to generated requests.

Answers are shortened, because an answer of thousands of tokens takes as long as a thousand short
answers. Deadlines are extended, because a short deadline causes the status 504, which is no defect.
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
"""Maps each path to the body's fields that limit the length of an answer."""


@schemathesis.hook  # type: ignore[untyped-decorator, unused-ignore]
def before_call(_context: Any, case: Any, _kwargs: dict[str, Any]) -> None:
    """Limits the answer length and extends the deadline of a request before it is sent."""
    if isinstance(case.body, dict) and case.path in _LENGTHS:
        _bound_answers(case.body, _LENGTHS[case.path])
    if case.headers and _TIMEOUT in case.headers:
        case.headers[_TIMEOUT] = _bounded_seconds(case.headers[_TIMEOUT])


def _bound_answers(body: dict[str, Any], names: Sequence[str]) -> None:
    """Lowers numeric length limits to MOST_TOKENS. A body without a limit gets MOST_TOKENS."""
    for name in names:
        value = body.get(name)
        if type(value) is int and value > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if all(body.get(name) is None for name in names):
        body[names[0]] = MOST_TOKENS


def _bounded_seconds(text: str) -> str:
    """Raises a positive number of seconds to at least LEAST_SECONDS. Other texts are unchanged."""
    try:
        seconds = float(text)
    except ValueError:
        return text
    return str(max(seconds, LEAST_SECONDS)) if seconds > 0 else text
