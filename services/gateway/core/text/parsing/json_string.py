"""Decodes the content of JSON strings that a model wrote."""

import json
import re

_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_ESCAPED = frozenset('"\\/bfnrt')


def decoded(text: str) -> str:
    """Returns the content of a JSON string. `text` has no quotes around it. A backslash before a
    character that JSON does not escape is kept, because models often do not double the backslashes
    of regular expressions.
    """
    content: str = json.loads(f'"{_ESCAPE.sub(_known_escape, text)}"', strict=False)
    return content


def _known_escape(match: re.Match[str]) -> str:
    """Keeps an escape that JSON defines. In any other escape, the backslash itself is escaped."""
    escaped = match[1]
    return match[0] if escaped in _ESCAPED or len(escaped) > 1 else f"\\\\{escaped}"
