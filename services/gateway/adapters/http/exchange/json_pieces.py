"""JSON in pieces: what is long is encoded a part at a time, and never held whole."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_ITEMS = 32
"""Items of a long list that are encoded at once."""
_SHORT = 128
"""Items of the longest list that is encoded whole, such as that of the tokens of one chunk."""
_BYTES = 16 * 1024
"""About the size of a piece that is sent."""


@dataclass(slots=True)
class LongList:
    """A list that is encoded item by item, from items that may be made as they are asked for.

    Items that hold long lists themselves are `nested`.
    """

    items: Iterable[Any]
    nested: bool = False


def listed(items: Iterable[Any], num_items: int) -> "list[Any] | LongList":
    """The items as a list where they are few."""
    return list(items) if num_items <= _SHORT else LongList(items)


class HoldsLongList(Exception):
    """A value is to be encoded in pieces."""


def _refuse_long(value: object) -> object:
    if isinstance(value, LongList):
        raise HoldsLongList
    raise TypeError(f"{type(value).__name__} is not JSON")


# `json.dumps` with separators makes an encoder each time, and this is every token's path.
to_json = json.JSONEncoder(separators=(",", ":"), default=_refuse_long).encode
"""A value without long lists as JSON. Raises HoldsLongList."""


def json_pieces(value: Any) -> Iterator[bytes]:
    """A value as JSON, in pieces of about 16 KiB."""
    parts: list[str] = []
    size = 0
    for part in _parts(value):
        parts.append(part)
        size += len(part)
        if size >= _BYTES:
            yield "".join(parts).encode()
            parts, size = [], 0
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
    """An answer in one piece where it is short, else in chunks, between which the loop turns."""
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
    """A response with a value as JSON, see `send_json`."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_json(self._value, send)
