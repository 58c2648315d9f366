"""If all tokens are banned, the request ends with a client error, even after many tokens."""

from typing import Any

import pytest

from tests.e2e.stack import Stack
from tests.plain_http import http_post


def tokens(stack: Stack, text: str) -> list[int]:
    ids: list[int] = http_post(f"{stack.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("bans", "num_tokens"),
    [
        ({"bad_words": ["zz"], "allowed": "z"}, 1),
        ({"bad_words": ["xx", "yy", "xyx", "yxy"], "allowed": "xy"}, 2),
    ],
)
def test_they_end_an_answer_with_400(
    stack: Stack, bans: dict[str, Any], num_tokens: int, temperature: float
) -> None:
    body = {
        "prompt": "abc",
        "max_tokens": 8,
        "temperature": temperature,
        "bad_words": bans["bad_words"],
        "allowed_token_ids": tokens(stack, bans["allowed"]),
    }
    response = http_post(f"{stack.url}/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "bad_words"), error
    assert f"no token to sample after {num_tokens} tokens" in error["message"]
