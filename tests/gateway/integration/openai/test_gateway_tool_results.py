"""Results of tools that contain images, as agents send them back in every later request."""

from pathlib import Path
from typing import Any

import pytest

from tests.gateway.integration.openai.test_gateway_tools import TEMPLATE, served_prompts
from tests.gateway.serving import Serving
from tests.gateway.tiny_tokenizer import write_tokenizer

ASKED: dict[str, Any] = {"role": "user", "content": "hi"}
FUNCTION = {"name": "look", "arguments": "{}"}
URL = "data:image/png;base64,eA=="
IMAGES: dict[str, tuple[str, Any, str]] = {
    "chat": (
        "chat/completions",
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}],
                },
                {
                    "role": "tool",
                    "tool_call_id": "a",
                    "content": [
                        {"type": "text", "text": "seen"},
                        {"type": "image_url", "image_url": {"url": URL}},
                    ],
                },
            ]
        },
        "image_url",
    ),
    "responses": (
        "responses",
        {
            "input": [
                ASKED,
                {"type": "function_call", "call_id": "a", **FUNCTION},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [
                        {"type": "input_text", "text": "seen"},
                        {"type": "input_image", "image_url": URL, "detail": "high"},
                    ],
                },
            ]
        },
        "input_image",
    ),
    "messages": (
        "messages",
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [
                                {"type": "text", "text": "seen"},
                                {
                                    "type": "image",
                                    "source": {
                                        "type": "base64",
                                        "media_type": "image/png",
                                        "data": "eA==",
                                    },
                                },
                            ],
                        }
                    ],
                },
            ],
            "max_tokens": 4,
        },
        "image",
    ),
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("calling") / "tiny", chat_template=TEMPLATE)


@pytest.mark.parametrize("api", IMAGES)
async def test_an_image_that_a_tool_returned_is_a_sentence(hermes: Serving, api: str) -> None:
    """Claude Code and Codex send what they read from an image file in each further request."""
    path, body, kind = IMAGES[api]
    hermes.scheduler.answer = hermes.tokens("ok")
    answer = await hermes.http.post(f"/v1/{path}", json={"model": "tiny", **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-stepwell-ignored-fields"] == kind
    omitted = "[image omitted: this server reads text only]"
    (prompt,) = served_prompts(hermes)
    assert prompt.replace("\n", "") == f"user:hi;assistant:(a look);tool:seen{omitted}#a;A:"
