"""Encodes long JSON values in pieces, so that the whole text is never in memory."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_ITEMS = 32
_SHORT = 128
"""Limit on the items of a list that is encoded in one call, such as the tokens of one event."""
_BYTES = 16 * 1024


@dataclass(slots=True)
class LongList:
    """A list that is encoded a few items at a time. Its items may be generated on demand.

    `nested` is true if items may contain long lists.
    """

    items: Iterable[Any]
    nested: bool = False


def listed(items: Iterable[Any], num_items: int) -> "list[Any] | LongList":
    """Returns the items as a list if they are few, and otherwise as a LongList."""
    return list(items) if num_items <= _SHORT else LongList(items)


class HoldsLongList(Exception):
    """The value contains a LongList and must be encoded in pieces."""


def _refuse_long(value: object) -> object:
    if isinstance(value, LongList):
        raise HoldsLongList
    raise TypeError(f"{type(value).__name__} is not JSON")


# One encoder for all calls: `json.dumps` with separators would make an encoder for each token.
to_json = json.JSONEncoder(separators=(",", ":"), default=_refuse_long).encode
"""Encodes a value as JSON. Raises HoldsLongList if the value contains a LongList."""


def json_pieces(value: Any) -> Iterator[bytes]:
    """Encodes a value as JSON, in pieces of about 16 KiB. No piece is empty, because an empty chunk
    would end a chunked body.
    """
    parts: list[str] = []
    size = 0
    for part in _parts(value):
        parts.append(part)
        size += len(part)
        if size >= _BYTES:
            yield "".join(parts).encode()
            parts, size = [], 0
    if parts:
        yield "".join(parts).encode()


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        mark = "{"
        for key, item in value.items():
            yield f"{mark}{to_json(key)}:"
            yield from _parts(item)
            mark = ","
        yield "{}" if mark == "{" else "}"
    elif isinstance(value, LongList):
        yield from _items(value)
    else:
        yield to_json(value)


def _items(value: LongList) -> Iterator[str]:
    items, mark = iter(value.items), "["
    while group := list(islice(items, 1 if value.nested else _ITEMS)):
        yield mark
        if value.nested:
            yield from _parts(group[0])
        else:
            yield to_json(group)[1:-1]
        mark = ","
    yield "[]" if mark == "[" else "]"


async def send_json(value: Any, send: Send) -> None:
    """Sends a value as the JSON body of an answer. A long body is sent in chunks, between which the
    event loop can do other work.
    """
    pieces = json_pieces(value)
    headers = [(b"content-type", b"application/json")]
    piece, following = next(pieces), next(pieces, None)
    if following is None:
        headers.append((b"content-length", str(len(piece)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while following is not None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0)
        piece, following = following, next(pieces, None)
    await send({"type": "http.response.body", "body": piece})


class JsonReply(Response):
    """A response whose body is a value, encoded by `send_json`."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_json(self._value, send)
