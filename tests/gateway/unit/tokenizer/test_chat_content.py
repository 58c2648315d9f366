"""The content of messages as passed to chat templates, compared with transformers' rendering."""

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.gateway.adapters.tokenizer.chat_content import (
    holds_all,
    iterates_over_content,
    render_content,
)
from services.gateway.adapters.tokenizer.chat_template_options import ChatTemplateOptions
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer
from tests.gateway.tiny_tokenizer import write_tokenizer

TURNS = (
    ("system", ["Be short.", "Be kind."]),
    ("user", ["hi", "there"]),
    ("assistant", ["yes"]),
    ("tool", ["7", "8"]),
)
ENDS = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
LOOP = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] | trim }};"
LOOP += "{% endif %}{% endfor %}"
FORMS = {
    "text": ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + ENDS, "string"),
    "concatenated": ("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}" + ENDS,) * 1
    + ("string",),
    "parts": ("{% for m in messages %}<|{{ m.role }}|>" + LOOP + ENDS, "openai"),
    "parts after the first turn": (
        "<|system|>{{ messages[0].content[0].text }}{% set turns = messages[1:] %}"
        "{% for m in turns %}<|{{ m.role }}|>" + LOOP + ENDS,
        "openai",
    ),
    "parts by number": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content[0].text }}" + ENDS,
        "openai",
    ),
    "either": (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}"
        "{% else %}" + LOOP + "{% endif %}" + ENDS,
        "openai",
    ),
    "by a macro": (
        "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}"
        "{% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ text(m.content) }}" + ENDS,
        "string",
    ),
}
MIXED = {
    "shown": "<|system|>{{ messages[0].content | trim }}",
    "added": "{{ '<|system|>' + messages[0].content }}",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(str(write_tokenizer(tmp_path_factory.mktemp("model"))))


def written(texts: Sequence[str], form: str) -> object:
    if form == "string":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


async def rendered(loaded: Any, template: str, turns: Any, form: str = "auto") -> str:
    loaded.chat_template = template
    return await HfTokenizer(loaded, ChatTemplateOptions(content_format=form)).render_chat(
        [{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={},
    )


def theirs(loaded: Any, template: str, turns: Any, forms: Sequence[str]) -> str:
    messages = [
        {"role": role, "content": written(texts, form)}
        for (role, texts), form in zip(turns, forms, strict=True)
    ]
    text: str = loaded.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return text


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", [1, 2, 4])
async def test_each_template_gets_what_it_takes(loaded: Any, name: str, count: int) -> None:
    template, form = FORMS[name]
    turns = TURNS[:count]
    assert iterates_over_content(template) == (form == "openai" and name != "parts by number")
    expected = theirs(loaded, template, turns, [form] * count)
    assert all(texts[0] in expected for _, texts in turns)
    if name == "parts by number":
        joined = [(role, ["\n".join(texts)]) for role, texts in turns]
        expected = theirs(loaded, template, joined, [form] * count)
    assert await rendered(loaded, template, turns) == expected
    # A text as content is rendered like a list that has this text as its only part.
    firsts = [(role, texts[:1]) for role, texts in turns]
    expected = theirs(loaded, template, firsts, [form] * count)
    assert await rendered(loaded, template, firsts) == expected
    assert await rendered(loaded, template, [(role, t[0]) for role, t in firsts]) == expected


@pytest.mark.parametrize("name", MIXED)
async def test_a_system_turn_that_is_taken_as_a_text(loaded: Any, name: str) -> None:
    template = MIXED[name] + "{% for m in messages[1:] %}<|{{ m.role }}|>" + LOOP + ENDS
    expected = theirs(loaded, template, TURNS, ["string", "openai", "openai", "openai"])
    assert await rendered(loaded, template, TURNS) == expected


def test_long_conversations_are_searched_in_little_time() -> None:
    texts = [f'"{number:x}' for number in range(30_000)]
    prompt = "".join(map(json.dumps, texts))
    turns = [{"role": "user", "content": "a"}] * 30_000
    began = time.process_time()
    assert holds_all(prompt, texts)
    assert not holds_all(prompt, [*texts, "missing"])
    rendered = render_content(
        lambda turns: "".join(f"<|user|>{turn['content']}<|end of the turn|>" for turn in turns),
        *(turns, FORMS["text"][0], "auto"),
    )
    assert rendered.count("a<") == len(turns)
    assert time.process_time() - began < 1


async def test_a_form_that_is_set_is_the_only_one(loaded: Any) -> None:
    template, _ = FORMS["either"]
    for form in ("string", "openai"):
        expected = theirs(loaded, template, TURNS, [form] * 4)
        assert await rendered(loaded, template, TURNS, form) == expected
    template, _ = FORMS["parts"]
    assert "hi" not in await rendered(loaded, template, TURNS[:2], "string")


async def test_a_last_turn_that_is_continued(loaded: Any) -> None:
    loaded.chat_template = FORMS["parts"][0].replace(";", "")
    prompt = await HfTokenizer(loaded).render_chat(
        [{"role": "user", "content": ["hi"]}, {"role": "assistant", "content": ["The ans"]}],
        add_generation_prompt=False,
        continue_final_message=True,
        variables={},
    )
    assert prompt == "<|user|>hi<|assistant|>The ans"
