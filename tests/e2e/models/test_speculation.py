"""Speculative decoding does not change answers, and the metrics count drafts."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.stack import Stack
from tests.plain_http import http_get, http_post

StackOf = Callable[[str], Stack]
COUNTS = re.compile(r"^vllm:spec_decode_(\w+)_total\{([^}]*)\} (\S+)$", re.MULTILINE)


def complete(stack: Stack, **changes: Any) -> dict[str, Any]:
    body = {"model": stack.model, "prompt": "one two one two one two", "max_tokens": 48}
    answer = http_post(f"{stack.url}/v1/completions", json=body | changes, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
def test_answers_with_log_probabilities_and_stop_strings_are_the_same(
    stack_of: StackOf, stack: Stack, sampling: dict[str, Any]
) -> None:
    whole = complete(stack, logprobs=2, **sampling)
    speculating = complete(stack_of("small pool"), logprobs=2, **sampling)
    theirs, ours = whole.pop("logprobs"), speculating.pop("logprobs")
    assert speculating == whole
    assert ours["tokens"] == theirs["tokens"]
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)
    stop = whole["text"][len(whole["text"]) // 2 :][:3]
    ended = complete(stack, stop=[stop], **sampling)
    assert ended["finish_reason"] == "stop"
    assert complete(stack_of("small pool"), stop=[stop], **sampling) == ended


def test_the_counts_of_drafts_add_up(stack_of: StackOf) -> None:
    stack = stack_of("small pool")
    for _ in range(2):
        complete(stack, temperature=0)
    text = http_get(f"{stack.url}/metrics").text
    counts = {(name, labels): float(value) for name, labels, value in COUNTS.findall(text)}
    total = {name: value for (name, labels), value in counts.items() if "position" not in labels}
    at = [value for (name, _), value in counts.items() if name == "num_accepted_tokens_per_pos"]
    assert 0 < total["num_drafts"] <= total["num_draft_tokens"] <= 4 * total["num_drafts"]
    assert len(at) == 4
    assert sum(at) == total["num_accepted_tokens"] <= total["num_draft_tokens"]
    assert at == sorted(at, reverse=True)
