"""Completions over HTTP: whole, streamed, many at once."""

import json

from tests.gateway.fake_scheduler import formula
from tests.gateway.serving import Serving


async def events(served: Serving, path: str, body: dict) -> list:
    """The events of a stream; checks that it ends with the mark of the end."""
    async with served.http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line]
        assert response.status_code == 200, lines
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_the_text_is_the_text_of_the_tokens(served: Serving) -> None:
    served.scheduler.answer = served.tokens(" hello world")
    response = await served.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "the", "max_tokens": 50}
    )
    body = response.json()
    assert response.status_code == 200, body
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["text"] == " hello world"
    assert choice["finish_reason"] == "stop"
    num_prompt, num_output = len(served.tokens("the")), len(served.tokens(" hello world")) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_says_the_same_in_pieces(served: Serving) -> None:
    body = {"prompt": "the hello", "max_tokens": 40, "seed": 7}
    whole = (await served.http.post("/v1/completions", json=body)).json()
    chunks = await events(served, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    prompt = served.tokens("the hello")
    expected = served.tokenizer.decode(
        [formula(prompt, 7, position) for position in range(40)], skip_special_tokens=True
    )
    # A cut character at the very end is dropped.
    assert expected.startswith(whole["choices"][0]["text"])
    assert len(expected) - len(whole["choices"][0]["text"]) <= 1
