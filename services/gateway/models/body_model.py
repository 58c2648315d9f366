"""Finds the name of the model in a JSON body, without parsing the body."""

import asyncio
import json
import re
from itertools import islice

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
"""A string, a quote without an end, or a bracket."""
_VALUE = re.compile(rb'\s*:\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_KEY = b'"model"'
_LONGEST_KEY = len(r'"\u006d\u006f\u0064\u0065\u006c"')
_TOKENS_AT_A_TIME = 10_000


async def model_in(body: bytes, max_tokens: int) -> str | None:
    """Returns the string under the key `model` of the object that `body` is, or begins with. The
    body may be incomplete. None if the key is missing, if its value is no string, or if it is not
    among the first `max_tokens` strings and brackets.
    """
    depth = 0
    for number, token in enumerate(islice(_TOKEN.finditer(body), max_tokens), 1):
        text = token[0]
        if text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
        elif text == b'"' or depth < 1:
            return None
        elif depth == 1 and _is_key(text) and (value := _VALUE.match(body, token.end())):
            return _string(value[1])
        if not number % _TOKENS_AT_A_TIME:
            await asyncio.sleep(0)
    return None


def _is_key(text: bytes) -> bool:
    is_escaped = len(text) <= _LONGEST_KEY and b"\\u" in text
    return text == _KEY or (is_escaped and _string(text) == "model")


def _string(text: bytes) -> str | None:
    try:
        return str(json.loads(text))
    except ValueError:
        return None
