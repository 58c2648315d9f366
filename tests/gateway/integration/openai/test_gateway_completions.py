"""Completions over HTTP, streamed and not streamed."""

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.gateway.fake_scheduler import FakeScheduler, formula
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import SPECIAL, write_marked_tokenizer, write_tokenizer


async def events(served: Serving, path: str, body: dict) -> list:
    """Reads the events of a stream, and checks that it ends with `[DONE]`."""
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
    # An incomplete character at the end of the text is dropped.
    assert expected.startswith(whole["choices"][0]["text"])
    assert len(expected) - len(whole["choices"][0]["text"]) <= 1


async def test_later_tokens_of_a_stream_are_sent_so_many_together(model: Path) -> None:
    """With `stream_interval` 3, later events than the first have at least 3 tokens."""
    async with serving(model, FakeScheduler(), stream_interval=3) as served:
        body = {"prompt": [5, 6, 7], "max_tokens": 20, "seed": 7, "return_token_ids": True}
        chunks = await events(served, "/v1/completions", {**body, "ignore_eos": True})
    sent = [chunk["choices"][0]["token_ids"] for chunk in chunks]
    assert [*chain(*sent)] == [formula([5, 6, 7], 7, position) for position in range(20)]
    assert len(sent) <= 8
    assert all(len(token_ids) >= 3 for token_ids in sent[1:-1])


async def test_many_prompts_in_every_form(served: Serving) -> None:
    ask = {"max_tokens": 5, "seed": 1}
    ids = served.tokens("the hello")
    alone = (await served.http.post("/v1/completions", json={"prompt": "the hello"} | ask)).json()
    text = alone["choices"][0]["text"]
    for prompt in (ids, ["the hello"], [ids]):
        body = (await served.http.post("/v1/completions", json={"prompt": prompt} | ask)).json()
        assert body["choices"][0]["text"] == text
    many = (
        await served.http.post(
            "/v1/completions", json={"prompt": ["the hello", "world"], "n": 2} | ask
        )
    ).json()
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == text
    assert many["usage"]["prompt_tokens"] == len(ids) + len(served.tokens("world"))
    assert many["usage"]["completion_tokens"] == 20


async def test_without_a_seed_every_answer_draws_on_its_own(served: Serving) -> None:
    """All answers of a request get different seeds, even answers to equal prompts."""
    ask = {"prompt": ["the hello"] * 16 + ["the world"] * 16, "n": 2, "max_tokens": 5}
    await served.http.post("/v1/completions", json=ask)
    assert len({add.sampling.seed for add in served.scheduler.adds}) == 64


async def test_a_seed_holds_for_each_prompt_as_if_it_came_alone(served: Serving) -> None:
    ask = {"n": 3, "seed": 11, "max_tokens": 5}
    for prompt in (["the", "world", "the"], "world"):
        await served.http.post("/v1/completions", json={"prompt": prompt} | ask)
    seeds = [add.sampling.seed for add in served.scheduler.adds]
    assert seeds[0] == 11
    assert len(set(seeds[:3])) == 3
    assert seeds == seeds[:3] * 4


async def test_the_default_length_is_openais(served: Serving) -> None:
    body = (await served.http.post("/v1/completions", json={"prompt": "the"})).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_echo_with_logprobs_covers_the_prompt(served: Serving) -> None:
    served.scheduler.answer = served.tokens(" world")
    ask = {"prompt": "the hello", "echo": True, "logprobs": 2, "max_tokens": 20}
    body = (await served.http.post("/v1/completions", json=ask)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "the hello world"
    logprobs = choice["logprobs"]
    tokens = [*served.tokens("the hello"), *served.tokens(" world"), 0]
    assert len(logprobs["tokens"]) == len(tokens)
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(tokens) - 1)
    assert logprobs["top_logprobs"][0] is None
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:-1]:
        assert choice["text"][offset:].startswith(token)
    chunks = await events(served, "/v1/completions", ask)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the hello world"
    streamed = [name for chunk in chunks for name in chunk["choices"][0]["logprobs"]["tokens"]]
    assert streamed == logprobs["tokens"]


async def test_echo_alone_scores_a_prompt(served: Serving) -> None:
    ask = {"prompt": "the hello", "echo": True, "logprobs": 0, "max_tokens": 0}
    body = (await served.http.post("/v1/completions", json=ask)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "the hello"
    assert len(choice["logprobs"]["tokens"]) == len(served.tokens("the hello"))
    assert body["usage"]["completion_tokens"] == 0
    (chunk,) = await events(served, "/v1/completions", ask)
    assert chunk["choices"][0] == choice


TEXT = "the 世界 🙂 é world"


@pytest.mark.parametrize("write", [write_tokenizer, write_marked_tokenizer])
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_text_offsets_count_characters(tmp_path, write, as_tokens: bool) -> None:
    """A token's offset is the number of whole characters before it, in prompt and answer."""
    async with serving(write(tmp_path / "tiny"), FakeScheduler()) as served:
        ids = served.tokens(TEXT)
        served.scheduler.answer = ids
        ask = {"prompt": ids if as_tokens else TEXT, "echo": True, "logprobs": 1}
        body = {**ask, "max_tokens": len(ids)}
        (choice,) = (await served.http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"].replace(" ", "") == (2 * TEXT).replace(" ", "")
        offsets = choice["logprobs"]["text_offset"]
        assert len(offsets) == 2 * len(ids)
        expected = [whole_characters(served, ids[:end]) for end in range(len(ids))]
        assert offsets[: len(ids)] == expected
        for start, token in zip(offsets, 2 * ids, strict=True):
            raw = served.tokenizer.token_bytes(token)
            if raw.strip().isascii() and raw.strip():
                assert choice["text"][start:].lstrip().startswith(raw.decode().strip())


def whole_characters(served: Serving, ids: list[int]) -> int:
    raw = b"".join(map(served.tokenizer.token_bytes, ids)).decode(errors="ignore")
    return len(raw) if served.tokenizer.is_byte_level else len(raw.removeprefix(" "))


async def test_the_tokens_of_a_character_start_where_it_does(served: Serving) -> None:
    ids = served.tokens("a🙂b")
    served.scheduler.answer = served.tokens("é!")
    ask = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 3}
    (choice,) = (await served.http.post("/v1/completions", json=ask)).json()["choices"]
    assert choice["text"] == "a🙂bé!"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3, 3, 4]


async def test_an_echo_leaves_half_a_character_to_the_answer(served: Serving) -> None:
    ids = served.tokens("a🙂")
    served.scheduler.answer = [*ids[3:], *served.tokens("b")]
    ask = {"prompt": ids[:3], "echo": True, "logprobs": 0, "max_tokens": 3}
    (choice,) = (await served.http.post("/v1/completions", json=ask)).json()["choices"]
    assert choice["text"] == "a🙂b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]


async def test_tokens_that_are_added_to_a_prompt_take_no_text(tmp_path) -> None:
    """The tokenizer adds special tokens to the prompt, and its offsets leave out spaces."""
    model = write_tokenizer(tmp_path / "tiny")
    path = model / "tokenizer.json"
    described = json.loads(path.read_text())
    described["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<|user|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {
                    name: {"id": name, "ids": [number], "tokens": [name]}
                    for number, name in enumerate(SPECIAL)
                },
            },
        ],
    }
    path.write_text(json.dumps(described))
    async with serving(model, FakeScheduler()) as served:
        served.scheduler.answer = served.tokens("!")
        ask = {"prompt": "the world", "echo": True, "logprobs": 0, "max_tokens": 1}
        (choice,) = (await served.http.post("/v1/completions", json=ask)).json()["choices"]
        assert choice["text"] == "the world!"
        assert choice["logprobs"]["tokens"] == ["<|user|>", "the", " world", "<|end|>", "!"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 3, 9, 9]


async def test_vllms_extras_arrive_at_the_scheduler(served: Serving) -> None:
    ask = {
        "prompt": "the",
        "max_tokens": 8,
        "top_k": 5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [7, 9],
        "allowed_token_ids": [7, 8, 9, 10],
        "logit_bias": {"8": -1.5},
        "bad_words": ["hello"],
        "priority": -3,
        "cache_salt": "mine",
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "request_id": "abc",
        "temperature": 0,
        "seed": -1,
    }
    body = (await served.http.post("/v1/completions", json=ask)).json()
    (choice,) = body["choices"]
    (add,) = served.scheduler.adds
    sampling = add.sampling
    assert body["id"] == add.request_id == "cmpl-abc"
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.25, 1.5)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.seed) == (3, 8, 2**64 - 1)
    assert list(sampling.eos_token_ids) == []
    assert list(sampling.stop_token_ids) == [7, 9]
    assert dict(zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)) == {
        8: -1.5
    }
    assert list(sampling.bad_words[0].ids) == served.tokens("hello")
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0
    assert (add.priority, add.cache_salt) == (-3, "mine")
    assert choice["prompt_token_ids"] == served.tokens("the")
    assert len(choice["token_ids"]) == 8
    assert choice["prompt_logprobs"][0] is None


async def test_usage_in_every_chunk(served: Serving) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(
        served,
        "/v1/completions",
        {"prompt": "the", "max_tokens": 3, "stream_options": options, "seed": 2},
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert chunks[-1]["choices"] == []


async def test_detokenize_gives_back_what_tokenize_was_given(served: Serving) -> None:
    asked = {"prompt": "the world", "return_token_strs": True}
    body = (await served.http.post("/tokenize", json=asked)).json()
    assert body["tokens"] == served.tokens("the world")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    back = (await served.http.post("/detokenize", json={"tokens": body["tokens"]})).json()
    assert back == {"prompt": "the world"}
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    body = (await served.http.post("/tokenize", json=chat)).json()
    assert body["tokens"] == served.tokens("<|user|>hello<|end|><|assistant|>")


async def test_models_health_status_and_metrics(served: Serving) -> None:
    (card,) = (await served.http.get("/v1/models")).json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
    assert (await served.http.get("/v1/models/tiny")).json()["id"] == "tiny"
    for other in ("other", "%0A", "tiny%0A", "tiny/"):
        assert (await served.http.get(f"/v1/models/{other}")).status_code == 404, other
    assert (await served.http.get("/v1/models/")).json()["object"] == "list"
    assert (await served.http.get("/health")).status_code == 200
    await served.http.post("/v1/completions", json={"prompt": "the", "max_tokens": 3})
    (replica,) = (await served.http.get("/status")).json()["replicas"]
    assert (replica["ready"], replica["stats"]["num_steps"]) == (True, 7)
    response = await served.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    metrics = response.text
    assert 'stepwell_gateway_generation_tokens_total{model_name="tiny"} 3.0' in metrics
    success = 'stepwell_gateway_answers_total{finished_reason="length",model_name="tiny"} 1.0'
    assert success in metrics
    assert 'stepwell_gateway_time_to_first_token_seconds_count{model_name="tiny"} 1.0' in metrics
    assert 'stepwell_gateway_inter_token_latency_seconds_count{model_name="tiny"} 2.0' in metrics
    assert (await served.http.get("/openapi.json")).status_code == 200
    missing = await served.http.get("/nowhere")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "GET /nowhere: Not Found"


@pytest.mark.parametrize(
    ("path", "served_path"),
    [("/chat/completions", "/v1/chat/completions"), ("/v1/v1/messages", "/v1/messages")],
)
async def test_a_path_of_another_base_url_is_answered_with_the_one_that_is_served(
    served: Serving, path: str, served_path: str
) -> None:
    answer = await served.http.post(path, json={})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == f"POST {path}: Not Found; there is {served_path}"
