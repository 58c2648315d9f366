"""Load generators against a gateway in this process, and the reader of their answers."""

import json
from pathlib import Path

import pytest

from benchmarks.common.clients import TokenStream
from benchmarks.soak.load_generator import Sending, Sent, send
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import serving
from tests.gateway.tiny_tokenizer import write_tokenizer


def event(token_ids: list[int], text: str) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": token_ids}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}).encode() + b"\n\n"


STREAM = b"".join(
    [event([5], '"token_ids": [1, 2, 3]'), event([], ""), event([6, 7], ""), b"data: [DONE]\n\n"]
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_tokens_are_counted_in_pieces_of_any_size(size: int) -> None:
    counts: list[int] = []
    stream = TokenStream(counts.append)
    stream.headers(200)
    for start in range(0, len(STREAM), size):
        stream.body(STREAM[start : start + size], 0.0)
    assert stream.is_done
    assert counts == ([1, 2] if size < 1000 else [3])


@pytest.mark.parametrize("status", [200, 503])
def test_an_error_is_read_from_an_event_and_from_an_answer(status: int) -> None:
    error = b'{"error": {"code": "queue_timeout"}}'
    stream = TokenStream(lambda _: None)
    stream.headers(status)
    for piece in (b"data: " + error + b"\n\n",) if status == 200 else (error[:9], error[9:]):
        stream.body(piece, 0.0)
    assert not stream.is_done
    assert stream.error == {"code": "queue_timeout"}


@pytest.mark.parametrize("loop", [{"concurrency": 3}, {"rate": 20.0}])
async def test_answers_are_counted_in_both_loops(loop: dict[str, float], tmp_path: Path) -> None:
    async with serving(write_tokenizer(tmp_path / "tiny")) as served:
        address = served.base_url.removeprefix("http://")
        sent: Sent = await send(Sending(address, "", 0.25, 8, 4, **loop))  # type: ignore[arg-type]
    assert sent.num_sent == sent.num_done == len(sent.first_token_millis) > 0
    assert sent.num_done_in_time <= sent.num_done
    assert (sent.other, sent.refusal_millis) == ({}, [])
    if "rate" in loop:
        assert sent.num_sent == 5


async def test_a_refusal_and_an_end_at_the_deadline_are_told_apart(tmp_path: Path) -> None:
    fake = FakeScheduler(permits=0)
    async with serving(write_tokenizer(tmp_path / "tiny"), fake, api_keys=("one",)) as served:
        address = served.base_url.removeprefix("http://")
        refused = await send(Sending(address, "other", 0.1, 8, 4, rate=20.0))
        late = await send(Sending(address, "one", 0.1, 8, 4, rate=20.0, deadline_seconds=0.3))
    assert (len(refused.refusal_millis), refused.other) == (2, {})
    assert (late.refusal_millis, late.other) == ([], {"deadline_exceeded": 2})
