"""Reads the idempotency key from a header, and compares two requests with the same key."""

from dataclasses import replace

import pytest

from services.common.errors import InvalidArgument
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.gateway.core.caller import ANYONE, Caller
from services.gateway.core.request.request import ClientRequest, Prompt
from services.gateway.options.idempotency.core.key import (
    IdempotencyKey,
    fingerprint,
    idempotency_key,
)

REQUEST = ClientRequest("r", (Prompt([1, 2]), Prompt([3])), SamplingParams(max_tokens=5))


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("8e03978e-40d5", "8e03978e-40d5"),
        ('"8e03978e-40d5"', "8e03978e-40d5"),
        ('  " a b "  ', " a b "),
        ('"', '"'),
        ("x" * 255, "x" * 255),
    ],
)
def test_a_key_is_plain_or_in_quotes(header: str, value: str):
    assert idempotency_key(header, ANYONE) == IdempotencyKey("", value)


def test_without_a_header_there_is_no_key():
    assert idempotency_key(None, ANYONE) is None


@pytest.mark.parametrize("header", ["", '""', "  ", "x" * 256, "t\u00e4g", "a\tb", "\x7f"])
def test_what_is_no_key_is_refused(header: str):
    with pytest.raises(InvalidArgument) as caught:
        idempotency_key(header, ANYONE)
    assert caught.value.field == "Idempotency-Key"


def test_scopes_differ_by_tenant_model_and_key():
    def scope(caller: str, key: str, model: bytes) -> str:
        made = idempotency_key(key, Caller(caller))
        assert made is not None
        return made.scope(model)

    scopes = {
        scope(caller, key, model)
        for caller in ("", "a", "ab")
        for key in ("b", "ab", "c")
        for model in (b"", b"m")
    }
    assert len(scopes) == 18
    assert all(len(one) == 32 for one in scopes)


@pytest.mark.parametrize(
    "other",
    [
        {"n": 2},
        {"stop": ("x",)},
        {"cache_salt": "s"},
        {"priority": 1},
        {"ignore_eos": True},
        {"default_max_tokens": 5},
        {"prompts": (Prompt([1, 2, 3]),)},
        {"prompts": (Prompt([1]), Prompt([2, 3]))},
        {"sampling": SamplingParams(max_tokens=5, temperature=0.5)},
        {"sampling": SamplingParams(max_tokens=5, seed=0)},
    ],
)
def test_requests_differ_by_all_that_answers_depend_on(other: dict):
    assert fingerprint("chat", REQUEST) != fingerprint("chat", replace(REQUEST, **other))


def test_requests_are_the_same_however_the_answer_is_named_or_written():
    same = replace(
        REQUEST, request_id="other", prompts=(Prompt([1, 2], "text", [0, 1]), Prompt([3]))
    )
    assert fingerprint("chat", REQUEST) == fingerprint("chat", same)
    assert fingerprint("chat", REQUEST) != fingerprint("text", REQUEST)


def test_embedded_prompts_are_compared_by_their_numbers():
    def embedded(data: bytes) -> ClientRequest:
        embeds = PromptEmbeds(1, EmbedsDtype.FLOAT32, data)
        return replace(REQUEST, prompts=(Prompt([0], embeds=embeds),))

    first, second = embedded(b"\0" * 16), embedded(b"\1" * 16)
    assert fingerprint("text", first) == fingerprint("text", embedded(b"\0" * 16))
    assert fingerprint("text", first) != fingerprint("text", second)
    assert fingerprint("text", first) != fingerprint("text", replace(first, prompts=(Prompt([0]),)))
