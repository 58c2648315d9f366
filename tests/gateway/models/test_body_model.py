"""The model's name in a JSON body is found as a JSON parser finds it."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.models.body_model import model_in

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["model", '"model"', '\\"model\\": "x"', "{", "]", "\\"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


MAX_TOKENS = 170_000


def found(body: bytes) -> str | None:
    return asyncio.run(model_in(body, MAX_TOKENS))


@given(st.dictionaries(TEXTS, VALUES, max_size=5), st.booleans(), st.sampled_from([None, 1]))
def test_a_parser_finds_the_same_name(
    body: dict[str, object], is_ascii: bool, indent: int | None
) -> None:
    value = body.get("model")
    text = json.dumps(body, ensure_ascii=is_ascii, indent=indent)
    assert found(text.encode()) == (value if isinstance(value, str) else None)


@given(VALUES, st.data())
def test_a_name_that_has_arrived_is_found_in_the_beginning_of_a_body(
    value: object, data: st.DataObject
) -> None:
    text = json.dumps({"messages": value, "model": "large", "stream": True}).encode()
    end = data.draw(st.integers(0, len(text)))
    assert found(text[:end]) == ("large" if end >= text.rindex(b"large") + 6 else None)


@pytest.mark.parametrize("key", [r"\u006d\u006F\u0064\u0065\u006c", r"mod\u0065l"])
def test_the_key_may_be_escaped(key: str) -> None:
    assert found(rf'{{"{key}s": "y", "a": "{key}", "{key}": "x"}}'.encode()) == "x"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"model": "x"',
        b'["model", "x"]',
        b'{"model"',
        b'{"model": 5}',
        b"\xff\x00{",
        b'{"a',
    ],
)
def test_a_body_without_a_name_has_none(body: bytes) -> None:
    assert found(body) is None


@pytest.mark.parametrize("begin", [b'{"a":', b'{"a":"'])
@pytest.mark.parametrize("piece", [b'\\"', b'"', b"{", b"[]", b'"",', b"\\", b'\\"model\\":', b" "])
def test_no_body_takes_long(begin: bytes, piece: bytes) -> None:
    began = time.process_time()
    found(begin + piece * (4 * 2**20 // len(piece)))
    assert time.process_time() - began < 2
