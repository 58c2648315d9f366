"""The fast search for fields in server-sent events finds the same values as a JSON parser."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench.adapters.event_stream import EventStream
from services.cli.client import events as parsed_events

TRICKY = st.sampled_from(
    ['"text":"x"', '"finish_reason":"stop"', '"usage":{', '"error":{"', "\n\n", "\r\n", "data: x"]
)
TEXT = st.one_of(st.text(max_size=12), TRICKY)


def completion_event(text: str, reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return {"id": "cmpl-1", "choices": [choice], "usage": None}


def chat_event(text: str, reason: str | None) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text}
    return {"object": "chat", "choices": [{"delta": delta, "finish_reason": reason}]}


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[str], str | None]:
    """A stream of server-sent events, the texts in it, and its finish reason."""
    make = draw(st.sampled_from([completion_event, chat_event]))
    texts = draw(st.lists(TEXT, max_size=8))
    reason = draw(st.sampled_from([None, "stop", "length"]))
    bodies = [make(text, None) for text in texts]
    if reason is not None:
        bodies.append(make("", reason))
    bodies.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}})
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    end = draw(st.sampled_from(["\n", "\r\n"]))
    ascii_only = draw(st.booleans())
    datas = [json.dumps(b, separators=separators, ensure_ascii=ascii_only) for b in bodies]
    lines = [f"data: {data}{end}{end}" for data in datas]
    comment = f": ping{end}{end}"
    text = comment + "".join(lines) + f"data: [DONE]{end}{end}"
    return text.encode("utf-8", "surrogatepass"), texts, reason


@given(streams(), st.lists(st.integers(1, 40)))
def test_a_stream_in_any_pieces(
    stream: tuple[bytes, list[str], str | None], sizes: list[int]
) -> None:
    data, texts, reason = stream
    found = EventStream(keep_events=True)
    num_outputs, num_ends = 0, 0
    for size in [*sizes, len(data)]:
        outputs, is_end = found.feed(data[:size])
        data = data[size:]
        num_outputs += outputs
        num_ends += is_end
    assert num_outputs == sum(bool(text) for text in texts)
    assert found.text() == "".join(texts)
    assert found.finish_reason == reason
    assert num_ends == (reason is not None)
    assert found.usage == {"prompt_tokens": 3, "completion_tokens": len(texts)}
    assert found.is_done
    assert found.failure is None


def test_an_error_within_the_stream() -> None:
    found = EventStream()
    found.feed(b'data: {"error": {"message": "the worker is away", "code": 503}}\n\n')
    assert found.failure is not None
    assert (found.failure.kind, found.failure.message) == ("stream", "the worker is away")
    assert not found.is_whole


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"function": {"arguments": '{"a'}}]},
    ],
)
def test_reasoning_and_tool_calls_are_output(delta: dict[str, Any]) -> None:
    event = {"choices": [{"delta": delta, "finish_reason": None}]}
    assert EventStream().feed(f"data: {json.dumps(event)}\n\n".encode()) == (1, False)


@given(st.lists(TEXT, max_size=5))
def test_the_commands_reader_finds_the_same_events(texts: list[str]) -> None:
    datas = [json.dumps(completion_event(text, None)) for text in texts]
    data = "".join(f"data: {data}\n\n" for data in datas)
    found = EventStream(keep_events=True)
    found.feed(data.encode())
    bodies = map(json.loads, parsed_events(data.split("\n")))
    assert found.text() == "".join(body["choices"][0]["text"] for body in bodies)
