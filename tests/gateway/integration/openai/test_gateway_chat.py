"""Chat completions, through the `openai` package."""

import json

import openai
import pytest

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import write_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


async def test_an_answer_and_its_prompt(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the world")
    served.scheduler.num_cached_tokens = 2
    async with served.openai() as client:
        completion = await client.chat.completions.create(model="tiny", messages=HELLO)
    (choice,) = completion.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "the world"
    assert choice.finish_reason == "stop"
    (add,) = served.scheduler.adds
    prompt = served.tokens("<|user|>hello<|end|><|assistant|>")
    assert add.prompt_token_ids == b"".join(t.to_bytes(4, "little") for t in prompt)
    # By default an answer may be as long as the model's length and the pool allow.
    assert add.sampling.max_tokens == served.scheduler.max_request_tokens - len(prompt)
    assert list(add.sampling.eos_token_ids) == [0]
    assert add.sampling.HasField("seed")
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.prompt_tokens_details.cached_tokens == 2


async def test_a_stream_has_role_deltas_finish_and_usage(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the 世界 world")
    async with served.openai() as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content for chunk in middle]
    assert "".join(deltas) == "the 世界 world"
    assert all(deltas)
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(served.tokens("the 世界 world")) + 1


async def test_n_answers_differ_and_the_first_is_that_of_one(served: Serving) -> None:
    async with served.openai() as client:
        ask = {"model": "tiny", "messages": HELLO, "seed": 5, "max_tokens": 12}
        two = await client.chat.completions.create(n=2, **ask)
        one = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(n=2, stream=True, **ask)
        streamed = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
    texts = [choice.message.content for choice in two.choices]
    assert [choice.index for choice in two.choices] == [0, 1]
    assert texts[0] == one.choices[0].message.content
    assert texts[0] != texts[1]
    assert texts == streamed
    assert two.usage.completion_tokens == 24
    assert two.usage.prompt_tokens == one.usage.prompt_tokens


async def test_logprobs_have_bytes_and_the_best(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the é")
    async with served.openai() as client:
        completion = await client.chat.completions.create(
            model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
        )
    content = completion.choices[0].logprobs.content
    assert len(content) == 3
    assert [entry.logprob for entry in content] == [-0.5] * 3
    assert [len(entry.top_logprobs) for entry in content] == [2] * 3
    assert bytes(byte for entry in content for byte in entry.bytes) == "the é".encode()[:5]
    assert content[0].token == "the"
    # A token that is only a part of a character is shown as its bytes.
    assert content[2].token == "bytes:\\xc3"
    assert completion.choices[0].message.content == "the "


async def test_stop_strings_end_the_answer_and_abort_the_rest(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the hello world of them")
    async with served.openai() as client:
        completion = await client.chat.completions.create(
            model="tiny", messages=HELLO, stop=["lo wo", "zzz"]
        )
    assert completion.choices[0].message.content == "the hel"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].stop_reason == "lo wo"


async def test_a_stop_string_may_begin_before_min_tokens(served: Serving) -> None:
    served.scheduler.answer = served.tokens("the stop string, the hello world")
    num_tokens = len(served.tokens("the stop string"))
    for least in (0, num_tokens - 1):
        body = {"prompt": "a", "max_tokens": 9, "stop": "top string", "min_tokens": least}
        answer = (await served.http.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("the s", "top string"), least


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_goes_round_in_circles_ends_in_vllms_words(
    served: Serving, stream: bool
) -> None:
    served.scheduler.answer = served.tokens("the" + " world" * 50)
    detection = {"max_pattern_size": 8, "min_count": 3}
    ask = {"messages": [{"role": "user", "content": "hi"}], "repetition_detection": detection}
    response = await served.http.post("/v1/chat/completions", json=ask | {"stream": stream})
    if stream:
        lines = response.text.replace("data: ", "").split()
        last = json.loads(lines[-2])["choices"][0]
    else:
        last = response.json()["choices"][0]
        assert last["message"]["content"] == "the" + " world" * 3
    assert (last["finish_reason"], last["stop_reason"]) == ("repetition", "repetition_detected")
    (add,) = served.scheduler.adds
    wanted = add.sampling.repetition_detection
    assert (wanted.max_pattern_size, wanted.min_pattern_size, wanted.min_count) == (8, 1, 3)


async def test_an_answer_can_be_continued(served: Serving) -> None:
    served.scheduler.answer = served.tokens(" world")
    messages = [*HELLO, {"role": "assistant", "content": "the hello"}]
    response = await served.http.post(
        "/v1/chat/completions", json={"messages": messages, "continue_final_message": True}
    )
    assert response.json()["choices"][0]["message"]["content"] == " world"
    expected = served.tokens("<|user|>hello<|end|><|assistant|>the hello")
    assert len(served.scheduler.adds[0].prompt_token_ids) == 4 * len(expected)


async def test_parts_of_text_are_joined_and_echoed_turns_taken(served: Serving) -> None:
    async with served.openai() as client:
        first = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=4, seed=3
        )
        said = first.choices[0].message.model_dump(exclude_unset=True)
        parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "world"}]
        await client.chat.completions.create(
            model="tiny",
            messages=[*HELLO, said, {"role": "user", "content": parts}],
            max_tokens=4,
            user="someone",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            response_format={"type": "text"},
            tool_choice="none",
        )


ADDED = {
    "openai": {
        "refusal": None,
        "annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.example"}}],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    },
    "litellm": {
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
        "reasoning_items": [],
        "images": [],
        "tool_calls": [],
        "cache_control": {"type": "ephemeral"},
    },
    "openrouter": {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    "mistral": {"prefix": False},
}


@pytest.mark.parametrize("origin", ADDED)
async def test_what_clients_and_proxies_add_to_a_turn_changes_nothing(
    served: Serving, origin: str
) -> None:
    said = {"role": "assistant", "content": "the world"}
    asked = {"role": "user", "content": [{"type": "text", "text": "more"}]}
    marked = {"type": "text", "text": "more", "cache_control": {"type": "ephemeral"}}
    for turns in (
        [*HELLO, said, asked],
        [*HELLO, {**said, **ADDED[origin]}, {**asked, "content": [marked]}],
    ):
        body = {"messages": turns, "max_tokens": 2}
        response = await served.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
    plain, added = served.scheduler.adds
    assert plain.prompt_token_ids == added.prompt_token_ids


THINKING_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }} "
    "{% endfor %}"
)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
async def test_what_the_assistant_thought_is_for_the_template(tmp_path, key: str) -> None:
    model = write_tokenizer(tmp_path / "thinker", chat_template=THINKING_TEMPLATE)
    turns = [{"role": role, "content": role, key: "hm"} for role in ("user", "assistant")]
    async with serving(model, FakeScheduler()) as served:
        response = await served.http.post("/tokenize", json={"messages": turns})
        tokens = served.tokens("user:user assistant:(hm)assistant ")
        assert response.json()["tokens"] == tokens


FAILING_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.content == 'add' %}{{ 1 + m.content }}{% endif %}"
    "{% if m.content == 'miss' %}{{ m.nothing.more }}{% endif %}"
    "{% if m.content == 'call' %}{{ m.content.__class__.__mro__ }}{% endif %}"
    "{% if m.content == 'say' %}{{ raise_exception('roles must\n alternate') }}{% endif %}"
    "{{ m.content | upper }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "options", "field", "message"),
    [
        ("add", {}, "messages", "the model's chat template cannot render the messages"),
        ("miss", {}, "messages", "the model's chat template cannot render the messages"),
        ("call", {}, "messages", "the model's chat template cannot render the messages"),
        (
            "say",
            {},
            "messages",
            "the model's chat template refuses the messages: roles must alternate",
        ),
        (
            "final",
            {"continue_final_message": True},
            "continue_final_message",
            "continue_final_message: the model's chat template changes the text of the final "
            "message, so the message cannot be continued",
        ),
    ],
)
async def test_what_fails_in_a_template_is_told_without_its_insides(
    tmp_path, content: str, options: dict, field: str, message: str
) -> None:
    model = write_tokenizer(tmp_path / "failing", chat_template=FAILING_TEMPLATE)
    async with serving(model, FakeScheduler()) as served:
        body = {"messages": [{"role": "user", "content": content}], **options}
        response = await served.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["message"]) == (field, message)


async def test_the_template_may_refuse(served: Serving) -> None:
    async with served.openai() as client:
        with pytest.raises(openai.BadRequestError, match="no such role: tool") as caught:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "tool", "tool_call_id": "a", "content": "x"}]
            )
    assert caught.value.param == "messages"


async def test_a_model_without_a_template_does_not_chat(tmp_path) -> None:
    model = write_tokenizer(tmp_path / "plain", chat_template=None)
    async with serving(model, FakeScheduler()) as served, served.openai() as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await client.chat.completions.create(model="plain", messages=HELLO)
        models = await client.models.list()
        assert [model.id for model in models.data] == ["plain"]
