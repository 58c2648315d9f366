"""/render: converts bodies of text and chat completions to bodies for /inference/v1/generate."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from services.common.errors import InvalidArgument
from services.gateway.adapters.http.exchange.json_pieces import LongList
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody, CompletionBody
from services.gateway.adapters.http.openai.chat import chat_request, render
from services.gateway.adapters.http.openai.completions import completion_request
from services.gateway.adapters.http.openai.sampling import WRITTEN_NAMES, written_parameters
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest
from services.gateway.options.vllm_routes.tokens.bodies import TokenSamplingBody

_NOT_RENDERED = (
    "echo",
    "best_of",
    "session",
    "prompt_embeds",
    "prompt_logprobs",
    "thinking_token_budget",
)
_NO_BUDGET = -1
Offsets = Sequence[Sequence[tuple[int, int]]]


def check_renders(body: CompletionBody | ChatCompletionBody) -> None:
    """Raises InvalidArgument for a field that /inference/v1/generate does not support."""
    for name in _NOT_RENDERED:
        value = getattr(body, name, None)
        if value is None or value is False or (name == _NOT_RENDERED[-1] and value == _NO_BUDGET):
            continue
        if name == "best_of" and value == (body.n or 1):
            continue
        raise InvalidArgument(
            f"{name}: /inference/v1/generate does not support this field", field=name
        )


async def rendered_chat(body: ChatCompletionBody, inference: Inference) -> dict[str, Any]:
    """Converts the body of a chat completion for /inference/v1/generate."""
    check_renders(body)
    request = await chat_request(body, inference, body.request_id or _new_name("chatcmpl"))
    offsets = None
    if body.return_token_offsets and body.truncate_prompt_tokens is None:
        text = await render(body, inference)
        offsets = await inference.tokenizer.token_offsets(
            [text], add_special_tokens=bool(body.add_special_tokens)
        )
    [rendered] = await _rendered(body, request, offsets, inference)
    return rendered


async def rendered_completion(body: CompletionBody, inference: Inference) -> LongList:
    """Converts the prompts of a completion for /inference/v1/generate."""
    check_renders(body)
    request = await completion_request(body, inference, body.request_id or _new_name("cmpl"))
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    offsets = None
    if body.return_token_offsets and body.truncate_prompt_tokens is None and texts:
        offsets = await inference.tokenizer.token_offsets(
            texts, add_special_tokens=body.add_special_tokens is not False
        )
    return LongList(await _rendered(body, request, offsets, inference), nested=True)


def _new_name(prefix: str) -> str:
    return f"{prefix}-{uuid4().hex}"


async def _rendered(
    body: CompletionBody | ChatCompletionBody,
    request: ClientRequest,
    offsets: Offsets | None,
    inference: Inference,
) -> list[dict[str, Any]]:
    """Checks `request` as if this server ran it. Returns one body for each prompt of `request`."""
    generation = await inference.prepare(request)
    firsts = generation.sequences[:: request.num_candidates]
    options = body.stream_options if body.stream else None
    shared: dict[str, Any] = {
        "model": body.model or inference.model_name,
        "stream": bool(body.stream),
        "stream_options": None if options is None else options.model_dump(exclude_none=True),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "skip_reading_prefix_cache": body.skip_reading_prefix_cache,
    }
    return [
        {
            "request_id": f"{request.request_id}-{number}" if number else request.request_id,
            "token_ids": LongList(first.prompt_token_ids),
            "token_offsets": None if offsets is None else LongList(map(list, offsets[number])),
            "sampling_params": {
                **_of_answers(body),
                **written_parameters(generation.request.sampling),
                "max_tokens": first.sampling.max_tokens,
            },
            **shared,
        }
        for number, first in enumerate(firsts)
    ]


def _of_answers(body: CompletionBody | ChatCompletionBody) -> dict[str, Any]:
    """Returns the fields of `sampling_params` that are copied from the body."""
    names = [name for name in TokenSamplingBody.model_fields if name not in WRITTEN_NAMES]
    given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
    return {**given, "n": body.n or 1}
