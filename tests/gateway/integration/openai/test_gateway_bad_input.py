"""Invalid requests: the error names the wrong field, and the scheduler gets no sequence."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save
from stepwell.scheduler.v1 import scheduler_pb2

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving

JSON = {"Content-Type": "application/json"}
CHAT = [{"role": "user", "content": "hi"}]
SAID = {"role": "assistant", "content": "hello"}

# Each entry has: what is wrong, the body, and the field that the error must name.
COMPLETIONS: list[tuple[str, dict[str, Any], str]] = [
    ("empty prompt", {"prompt": ""}, "prompt"),
    ("no tokens", {"prompt": []}, "prompt"),
    ("one of many empty", {"prompt": ["a", ""]}, "prompt[1]"),
    ("one of many too long", {"prompt": [[5], [5] * 600]}, "prompt[1]"),
    ("one of many texts too long", {"prompt": ["a", "z" * 600]}, "prompt[1]"),
    (
        "options of no stream",
        {"prompt": "a", "stream_options": {"include_usage": True}},
        "stream_options",
    ),
    ("no prompt", {}, "prompt"),
    ("prompt too long", {"prompt": [5] * 600}, "prompt"),
    ("prompt beyond the pool", {"prompt": [5] * 490}, "prompt"),
    ("no room for an answer", {"prompt": [5] * 480}, "prompt"),
    ("answer too long", {"prompt": [5], "max_tokens": 481}, "max_tokens"),
    (
        "no room for a truncated prompt",
        {"prompt": "a", "max_tokens": 600, "truncate_prompt_tokens": -1},
        "max_tokens",
    ),
    ("token id unknown", {"prompt": [5, 320]}, "prompt"),
    ("token id negative", {"prompt": [5, -1]}, "prompt[1]"),
    ("token id huge", {"prompt": [10**40]}, "prompt[0]"),
    ("prompt of the wrong type", {"prompt": 5}, "prompt"),
    ("text for a number", {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ("number for a flag", {"prompt": "a", "stream": 1}, "stream"),
    ("flag for a number", {"prompt": "a", "n": True}, "n"),
    ("fraction for a count", {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ("negative max_tokens", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    ("no max_tokens", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("negative temperature", {"prompt": "a", "temperature": -0.1}, "temperature"),
    ("top_p of zero", {"prompt": "a", "top_p": 0}, "top_p"),
    ("top_k below -1", {"prompt": "a", "top_k": -2}, "top_k"),
    ("top_k beyond int32", {"prompt": "a", "top_k": 2**31}, "top_k"),
    ("top_k beyond the wire", {"prompt": "a", "top_k": 2**32}, "top_k"),
    ("top_k of int64", {"prompt": "a", "top_k": 2**63 - 1}, "top_k"),
    ("top_k below int64", {"prompt": "a", "top_k": -(2**63) - 1}, "top_k"),
    ("max_tokens beyond the wire", {"prompt": "a", "max_tokens": 2**63 - 1}, "max_tokens"),
    ("min_tokens beyond the wire", {"prompt": "a", "min_tokens": 2**63 - 1}, "min_tokens"),
    ("negative min_tokens", {"prompt": "a", "min_tokens": -1}, "min_tokens"),
    ("n beyond the wire", {"prompt": "a", "n": 2**63 - 1}, "n"),
    ("negative n", {"prompt": "a", "n": -1}, "n"),
    ("priority beyond int32", {"prompt": "a", "priority": 2**31}, "priority"),
    ("logprobs beyond the wire", {"prompt": "a", "logprobs": 2**63 - 1}, "logprobs"),
    ("negative logprobs", {"prompt": "a", "logprobs": -1}, "logprobs"),
    ("all prompt logprobs", {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
    ("stop token beyond int32", {"prompt": "a", "stop_token_ids": [2**31]}, "stop_token_ids[0]"),
    ("best_of beyond the wire", {"prompt": "a", "best_of": 2**63 - 1}, "best_of"),
    ("bias of a huge token", {"prompt": "a", "logit_bias": {"9999999999": 1}}, "logit_bias"),
    ("no float32", {"prompt": "a", "temperature": 1e39}, "temperature"),
    (
        "penalty that no logit survives",
        {"prompt": "a", "repetition_penalty": 1e-40},
        "repetition_penalty",
    ),
    (
        "pattern beyond the wire",
        {"prompt": "a", "repetition_detection": {"max_pattern_size": 2**63 - 1, "min_count": 2}},
        "repetition_detection.max_pattern_size",
    ),
    ("min_p above one", {"prompt": "a", "min_p": 1.5}, "min_p"),
    ("n of zero", {"prompt": "a", "n": 0}, "n"),
    ("n too large", {"prompt": "a", "n": 257}, "n"),
    ("too many prompts", {"prompt": ["a"] * 257}, "prompt"),
    ("penalty out of range", {"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    ("repetition penalty", {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ("min above max", {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("bias of no token", {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ("bias of an unknown token", {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
    ("bias out of range", {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    ("too many logprobs", {"prompt": "a", "logprobs": 21}, "logprobs"),
    (
        "no longest pattern",
        {"prompt": "a", "repetition_detection": {"min_pattern_size": 2, "min_count": 2}},
        "repetition_detection.min_pattern_size",
    ),
    (
        "pattern too long",
        {"prompt": "a", "repetition_detection": {"max_pattern_size": 1025, "min_count": 2}},
        "repetition_detection.max_pattern_size",
    ),
    (
        "once is no repetition",
        {"prompt": "a", "repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
        "repetition_detection.min_count",
    ),
    (
        "count beyond the wire",
        {"prompt": "a", "repetition_detection": {"max_pattern_size": 3, "min_count": 2**40}},
        "repetition_detection.min_count",
    ),
    ("empty stop", {"prompt": "a", "stop": ["x", ""]}, "stop"),
    ("too many stops", {"prompt": "a", "stop": ["x"] * 65}, "stop"),
    ("stop of the wrong type", {"prompt": "a", "stop": [1]}, "stop[0]"),
    ("nothing allowed", {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    ("suffix", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("best_of below n", {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    ("seed too large", {"prompt": "a", "seed": 2**70}, "seed"),
    ("request_id", {"prompt": "a", "request_id": "a\nb"}, "request_id"),
    ("stored", {"prompt": "a", "store": True}, "store"),
    (
        "prompt logprobs in a stream",
        {"prompt": "a", "stream": True, "prompt_logprobs": 1},
        "prompt_logprobs",
    ),
]

CHATS: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", {"messages": []}, "messages"),
    ("no such role", {"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
    (
        "an image",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ("tools", {"messages": CHAT, "tools": [{}]}, "tools[0].type"),
    (
        "a call of a tool",
        {"messages": [{**SAID, "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ("an image of the assistant", {"messages": [{**SAID, "images": [{}]}]}, "messages[0].images"),
    ("a beginning", {"messages": [{**SAID, "prefix": True}]}, "messages[0].prefix"),
    ("a part of an answer", {"messages": [{**SAID, "partial": True}]}, "messages[0].partial"),
    ("no thought", {"messages": [{**SAID, "reasoning": 1}]}, "messages[0].reasoning"),
    (
        "another conversation",
        {"messages": CHAT, "chat_template_kwargs": {"conversations": []}},
        "chat_template_kwargs",
    ),
    (
        "an unknown format",
        {"messages": CHAT, "response_format": {"type": "yaml"}},
        "response_format",
    ),
    (
        "a schema that is none",
        {
            "messages": CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "what"}},
            },
        },
        "response_format",
    ),
    (
        "no schema",
        {
            "messages": CHAT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a"}},
        },
        "response_format.json_schema.schema",
    ),
    (
        "a wrong expression",
        {"messages": CHAT, "structured_outputs": {"regex": "("}},
        "structured_outputs",
    ),
    (
        "two forms",
        {"messages": CHAT, "structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
    ),
    (
        "a form and a format",
        {
            "messages": CHAT,
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
        },
        "structured_outputs",
    ),
    (
        "a structural tag",
        {"messages": CHAT, "structured_outputs": {"regex": "a", "structural_tag": {}}},
        "structured_outputs",
    ),
    (
        "half a surrogate pair in a structural tag",
        {
            "messages": CHAT,
            "structured_outputs": {
                "structural_tag": r'{"format": {"type": "const_string", "value": "<\ud800>"}}'
            },
        },
        "structured_outputs",
    ),
    ("an old name", {"messages": CHAT, "guided_json": {}}, "guided_json"),
    ("top without logprobs", {"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
    ("too many top", {"messages": CHAT, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (
        "two lengths",
        {"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2},
        "max_completion_tokens",
    ),
    ("too long", {"messages": [{"role": "user", "content": "z" * 600}]}, "messages"),
    ("length", {"messages": CHAT, "max_completion_tokens": 5000}, "max_completion_tokens"),
    (
        "two endings",
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (
        "reserved",
        {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
    ),
]


async def refused(served: Serving, path: str, body: dict[str, Any], field: str) -> None:
    response = await served.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field, error
    assert field.partition("[")[0].partition(".")[0] in error["message"], error


async def test_a_bad_completion_is_refused_by_its_field(served: Serving) -> None:
    for what, body, field in COMPLETIONS:
        for stream in ({}, {"stream": True}):
            if stream and ("stream" in body or "stream_options" in body):
                continue
            print(what)
            await refused(served, "/v1/completions", body | stream, field)
    assert served.scheduler.adds == []


async def test_a_bad_chat_is_refused_by_its_field(served: Serving) -> None:
    for what, body, field in CHATS:
        print(what)
        await refused(served, "/v1/chat/completions", body, field)
    assert served.scheduler.adds == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": ["a"], "temperature": NaN}',
        b'{"prompt": ["a"], "temperature": Infinity}',
        b'{"prompt": ["a"], "logit_bias": {"5": -Infinity}}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ["a"], "temperature": 1e999}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
    ],
)
async def test_what_is_no_request_at_all(served: Serving, raw: bytes) -> None:
    for path in ("/v1/completions", "/tokenize", "/detokenize", "/v1/chat/completions"):
        response = await served.http.post(path, content=raw, headers=JSON)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
    assert served.scheduler.adds == []


async def test_numbers_that_are_none_name_their_field(served: Serving) -> None:
    raw = b'{"prompt": ["a"], "temperature": NaN}'
    error = (await served.http.post("/v1/completions", content=raw, headers=JSON)).json()["error"]
    assert error["param"] == "temperature"


@pytest.mark.parametrize("number", ["1e400", "-Infinity", "NaN"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/responses",
            '{"input": "a", "tools": [{"type": "function", "name": "f", "parameters": %s}]}',
            "tools[0].parameters",
        ),
        (
            "/v1/responses",
            '{"input": "a", "text": {"format": {"type": "json_schema", "name": "f", '
            '"schema": %s}}}',
            "text.format.schema",
        ),
        (
            "/v1/messages",
            '{"max_tokens": 3, "messages": [{"role": "user", "content": "a"}], '
            '"tools": [{"name": "f", "input_schema": %s}]}',
            "tools[0].input_schema",
        ),
    ],
)
async def test_numbers_in_schemas_are_finite(
    served: Serving, path: str, body: str, param: str, number: str
) -> None:
    """Responses contain the schemas of their requests, and JSON has no infinity."""
    raw = body % '{"properties": {"x": {"enum": [1, %s]}}}' % number
    response = await served.http.post(path, content=raw.encode(), headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"] == f"{param}: must have only finite numbers"


async def test_the_message_of_a_long_prompt_has_the_counts(served: Serving) -> None:
    body = (await served.http.post("/v1/completions", json={"prompt": [5] * 600})).json()
    assert "600 tokens" in body["error"]["message"]
    assert "480 tokens" in body["error"]["message"]


async def test_clients_know_an_error_of_length_by_its_words_and_its_code(served: Serving) -> None:
    """Clients recognize the error, as with OpenAI: LiteLLM by its text, which it searches in lower
    case, and LangChain by its code.
    """
    messages = [{"role": "user", "content": "z" * 600}]
    for path, body, field in (
        ("/v1/completions", {"prompt": [5] * 600}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 300, "max_tokens": 481}, "max_tokens"),
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 500}, "max_tokens"),
    ):
        response = await served.http.post(path, json=body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        assert "this model's maximum context length is 480 tokens" in error["message"].lower()
    served.scheduler.rejection = scheduler_pb2.Rejection(
        code=11, reason="LONGER_THAN_MODEL", field="prompt_token_ids", message="too long"
    )
    response = await served.http.post("/v1/completions", json={"prompt": "a"})
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_an_answer_may_be_shorter_than_max_tokens_in_a_full_context(served: Serving) -> None:
    for prompts, max_tokens, most in (
        ([[5] * 400], 100, [80]),
        ([[5] * 479, [5] * 9], 480, [1, 471]),
        ([[5] * 400], 80, [80]),
    ):
        served.scheduler.adds.clear()
        body = {"prompt": prompts, "max_tokens": max_tokens}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
        assert [add.sampling.max_tokens for add in served.scheduler.adds] == most


async def test_a_body_of_10_mb_is_not_read(served: Serving) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    response = await served.http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 413

    async def pieces():
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    # The limit also applies to a chunked body without a content-length.
    response = await served.http.post("/v1/completions", content=pieces(), headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await served.http.post("/v1/completions", json={"prompt": "the"})).status_code == 200


async def test_the_openai_package_raises_its_errors_for_an_unknown_model_and_a_bad_field(
    served: Serving,
) -> None:
    async with served.openai() as client:
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            await client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_argument"
    assert served.scheduler.adds == []


async def test_priority_where_there_is_none(model) -> None:
    async with serving(model, FakeScheduler(priority_scheduling=False)) as served:
        await refused(served, "/v1/completions", {"prompt": "a", "priority": 1}, "priority")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_scheduler_keeps_its_status(served: Serving, stream: bool) -> None:
    served.scheduler.rejection = scheduler_pb2.Rejection(
        code=11, reason="TOO_LONG", field="prompt_token_ids", message="too long"
    )
    response = await served.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    served.scheduler.rejection = scheduler_pb2.Rejection(
        code=8, reason="QUEUE_FULL", message="the queue is full", retry_after_millis=2500
    )
    response = await served.http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert response.status_code == 503
    hint = int(response.headers["retry-after-ms"])
    assert 2500 <= hint <= 3126, "up to a quarter more, so that not all come back at once"
    assert response.headers["retry-after"] == str(-(-hint // 1000))
    assert response.json()["error"] == {
        "message": "the queue is full",
        "type": "service_unavailable_error",
        "param": None,
        "code": "queue_full",
    }


async def test_the_engine_may_give_up(served: Serving) -> None:
    served.scheduler.engine_error = "the logits held NaN"
    async with served.openai() as client:
        with pytest.raises(openai.InternalServerError, match="the logits held NaN") as ended:
            await client.completions.create(model="tiny", prompt="a")
    assert ended.value.code == "nan_in_logits"


async def test_embeddings_that_the_model_cannot_compute_with_are_the_clients(
    served: Serving,
) -> None:
    """If finite but large embeddings make the model compute NaN, the client gets the error."""
    served.scheduler.engine_error = "the logits held NaN"
    file = base64.b64encode(save({"a": torch.full((3, 4), 3e38)})).decode()
    await refused(served, "/v1/completions", {"prompt_embeds": file}, "prompt_embeds")


async def test_what_would_be_costly_is_refused_before_it_is_done(served: Serving) -> None:
    """Each body is smaller than the limit of 4 MiB, but would take seconds to process."""
    costly: list[tuple[dict[str, Any], str | None]] = [
        ({"prompt": "x" * 3_000_000}, "prompt"),
        ({"prompt": ["the"] * 500_000}, "prompt"),
        ({"prompt": [5] * 100_000 + ["x"]}, "prompt[100000]"),
        ({"prompt": [5] * 500_000}, "prompt"),
        ({"prompt": "a", "bad_words": ["the"] * 400_000}, "bad_words"),
        ({"prompt": "a", "stop": ["x"] * 500_000}, "stop"),
        ({"prompt": "a", "logit_bias": {str(n): "x" for n in range(200_000)}}, None),
        ({"prompt": "a"} | {f"field{n}": 1 for n in range(150_000)}, None),
    ]
    for body, field in costly:
        response = await served.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert len(response.content) < 1000
    assert served.scheduler.adds == []


async def test_a_text_of_far_too_many_tokens_is_not_tokenized_whole(served: Serving):
    text = "".join(chr(33 + number % 90) for number in range(4500))
    answer = await served.http.post("/v1/completions", json={"prompt": text})
    assert answer.status_code == 400
    assert "prompt has more than 480 tokens" in answer.json()["error"]["message"]
    answer = await served.http.post("/v1/completions", json={"prompt": text[:3000]})
    assert re.search(r"prompt has \d{4} tokens", answer.json()["error"]["message"])


async def test_bad_words_are_bounded_in_all(served: Serving):
    words = ["x" * 1000] * 20
    answer = await served.http.post("/v1/completions", json={"prompt": "a", "bad_words": words})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "bad_words"


async def test_logprobs_of_an_answer_that_is_not_streamed_are_bounded(model: Path):
    async with serving(model, FakeScheduler(), max_body_bytes=2048) as served:
        body = {"prompt": "a", "max_tokens": 100, "logprobs": 20, "n": 1}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 400
        for change in ({"stream": True}, {"max_tokens": 90}):
            answer = await served.http.post("/v1/completions", json=body | change)
            assert answer.status_code == 200
