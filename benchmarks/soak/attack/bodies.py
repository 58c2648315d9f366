"""JSON bodies that are costly for a gateway to parse, check or tokenize."""

import base64
from collections.abc import Callable
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_USER = {"role": "user", "content": "a"}


def _called(num_calls: int) -> dict[str, Any]:
    """An assistant's turn with calls whose arguments are no JSON object."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":'}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * num_calls}


def _bodies() -> dict[str, tuple[str, Callable[[], Any]]]:
    """Maps the name of each costly body to its path and to a function that builds the body."""
    ids, text = list(range(5, 300)) * 400, {"prompt": "a", "max_tokens": 8}
    return {
        "one character": (TEXT, lambda: {"prompt": "a" * 3_900_000}),
        "spaces": (TEXT, lambda: {"prompt": " " * 3_900_000}),
        "words": (CHAT, lambda: {"messages": [_USER | {"content": "hello " * 600_000}]}),
        "many ids": (TEXT, lambda: {"prompt": ids}),
        "too many ids": (TEXT, lambda: {"prompt": [7] * 1_000_000}),
        "lists": (TEXT, lambda: {"prompt": [[5]] * 16_000}),
        "256 prompts": (TEXT, lambda: {"prompt": ["a b " * 900] * 256}),
        "256 short prompts": (TEXT, lambda: text | {"prompt": ["a"] * 256}),
        "messages": (CHAT, lambda: {"messages": [_USER] * 4_900}),
        "too many messages": (CHAT, lambda: {"messages": [_USER] * 100_000}),
        "parts": (
            CHAT,
            lambda: {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4_900}]
            },
        ),
        "calls": (CHAT, lambda: {"messages": [_called(1_900)]}),
        "developers after a long text": (
            CHAT,
            lambda: {
                "messages": [
                    _USER | {"content": "xy" * 1_900_000},
                    *[{"role": "developer", "content": "xyxyxyxyxyz"}] * 40,
                ]
            },
        ),
        "variables": (
            CHAT,
            lambda: {"messages": [_USER], "chat_template_kwargs": {"x": [{"a": [1]}] * 4_900}},
        ),
        "many variables": (
            CHAT,
            lambda: {"messages": [_USER], "chat_template_kwargs": {"x": [1] * 131_000}},
        ),
        "bad words": (TEXT, lambda: text | {"bad_words": ["ab " * 5] * 1_024}),
        "long bad words": (TEXT, lambda: text | {"bad_words": ["x" * 3_000_000]}),
        "stop strings": (
            TEXT,
            lambda: text | {"stop": ["a" * 1_000 + str(n) for n in range(64)], "max_tokens": 400},
        ),
        "biases": (TEXT, lambda: text | {"logit_bias": {str(n): 1 for n in range(4_096)}}),
        "too many biases": (
            TEXT,
            lambda: text | {"logit_bias": {str(n): 1 for n in range(10**5)}},
        ),
        "allowed": (TEXT, lambda: text | {"allowed_token_ids": list(range(100_000))}),
        "logprobs": (
            TEXT,
            lambda: text | {"n": 64, "logprobs": 20, "max_tokens": 64, "echo": True},
        ),
        "unknown keys": (TEXT, lambda: text | {f"k{n}": 1 for n in range(16_000)}),
        "a long name": (TEXT, lambda: text | {"model": "m" * 3_900_000}),
        "a long key": (TEXT, lambda: text | {"k" * 3_900_000: 1}),
        "embeddings": (
            TEXT,
            lambda: {"prompt_embeds": base64.b64encode(b"\xff" * 2_900_000).decode()},
        ),
        "tokenize": ("/tokenize", lambda: {"prompt": "a " * 65_000, "return_token_strs": True}),
        "tokenize too much": ("/tokenize", lambda: {"prompt": "hello " * 600_000}),
        "detokenize": ("/detokenize", lambda: {"tokens": ids}),
    }


BODIES = _bodies()


def costly(name: str) -> tuple[str, dict[str, Any]]:
    path, make = BODIES[name]
    return path, make() | ({"max_tokens": 8} if path == CHAT else {})
