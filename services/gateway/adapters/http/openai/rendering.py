"""Renders conversations to prompts. Some chat templates expect the arguments of tool calls as
objects, others as texts. Many templates have no role `developer`.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from services.common.errors import InvalidArgument
from services.gateway.adapters.tokenizer.chat_content import holds_all, texts_of
from services.gateway.core.ports import Tokenizer

Turns = Sequence[Mapping[str, Any]]
_MESSAGES = "messages"
"""The field of errors that the chat template raised because of the conversation."""


async def render_turns(tokenizer: Tokenizer, turns: Turns, **options: Any) -> str:
    """Renders the prompt. `options` are keyword arguments of `Tokenizer.render_chat`.

    In `turns`, the arguments of a call are an object, or a text if they are not a JSON object. If
    the template raises an error, or omits one of these texts or a developer's text from the prompt,
    the turns are rendered again: with all arguments as texts, with all arguments as objects, where
    a text becomes the only value of an object, with the role `system` in place of `developer`, and
    with the texts of all system turns in the first turn.
    If no prompt contains all texts, the first prompt is returned. If all attempts raised an error,
    the first error is raised.
    """
    texts = [arguments for arguments in _arguments(turns) if isinstance(arguments, str)]
    texts += [text for turn in turns if _is_developers(turn) for text in texts_of(turn["content"])]
    prompts: list[str] = []
    errors: list[InvalidArgument] = []
    for form in _forms(turns):
        try:
            prompt = await tokenizer.render_chat(form, **options)
        except InvalidArgument as error:
            if error.field != _MESSAGES:
                raise
            errors.append(error)
            continue
        # In a thread, because the search of a long prompt may take a second.
        if not texts or await asyncio.to_thread(holds_all, prompt, texts):
            return prompt
        prompts.append(prompt)
    if not prompts:
        raise errors[0]
    return prompts[0]


def _arguments(turns: Turns) -> Iterator[dict[str, Any] | str]:
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            yield call["function"]["arguments"]


def _forms(turns: Turns) -> Iterator[Turns]:
    """Yields the turns unchanged, and with arguments in other forms. If they contain turns of the
    developer, then yields the same forms with these turns as the system's. If there are system
    turns after the first turn, then yields the same forms with one system turn.
    """
    yield from _forms_of_arguments(turns)
    if any(map(_is_developers, turns)):
        turns = [{**turn, "role": "system"} if _is_developers(turn) else turn for turn in turns]
        yield from _forms_of_arguments(turns)
    if any(map(_is_systems, turns[1:])):
        texts = [text for turn in turns if _is_systems(turn) for text in texts_of(turn["content"])]
        others = [turn for turn in turns if not _is_systems(turn)]
        yield from _forms_of_arguments([{"role": "system", "content": texts}, *others])


def _forms_of_arguments(turns: Turns) -> Iterator[Turns]:
    """Yields the turns unchanged. If they contain calls, also yields them with all arguments as
    texts, and with all arguments as objects.
    """
    yield turns
    if any("tool_calls" in turn for turn in turns):
        yield [_with_arguments(turn, _as_text) for turn in turns]
        yield [_with_arguments(turn, _as_object) for turn in turns]


def _is_developers(turn: Mapping[str, Any]) -> bool:
    return bool(turn["role"] == "developer")


def _is_systems(turn: Mapping[str, Any]) -> bool:
    return bool(turn["role"] == "system")


def _as_text(arguments: dict[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _as_object(arguments: dict[str, Any] | str) -> dict[str, Any]:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _with_arguments(
    turn: Mapping[str, Any], change: Callable[[dict[str, Any] | str], object]
) -> Mapping[str, Any]:
    if "tool_calls" not in turn:
        return turn
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": change(call["function"]["arguments"])},
        }
        for call in turn["tool_calls"]
    ]
    return {**turn, "tool_calls": calls}
