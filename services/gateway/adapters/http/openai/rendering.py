"""Renders conversations to prompts, for templates that expect arguments of calls as objects or as
texts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from services.common.errors import InvalidArgument
from services.gateway.adapters.tokenizer.chat_content import holds
from services.gateway.core.ports import Tokenizer

Turns = Sequence[Mapping[str, Any]]
_MESSAGES = "messages"
"""The field of errors that a template raises about the conversation."""


async def render_turns(tokenizer: Tokenizer, turns: Turns, **options: Any) -> str:
    """Renders the prompt; `options` are the options of `Tokenizer.render_chat`. Raises
    InvalidArgument.

    Arguments of calls are objects, or texts if the model wrote no JSON object. If the template
    raises, or its prompt lacks such a text, it is tried again: first with all arguments as texts,
    then with all as objects, in which a text is the only value. If no prompt contains all texts,
    the first prompt is returned. If there is no prompt, the first error is raised.
    """
    texts = [arguments for arguments in _arguments(turns) if isinstance(arguments, str)]
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
        if all(holds(prompt, text) for text in texts):
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
    """The turns unchanged; if there are calls, then also with their arguments as texts and as
    objects.
    """
    yield turns
    if any("tool_calls" in turn for turn in turns):
        yield [_with_arguments(turn, _as_text) for turn in turns]
        yield [_with_arguments(turn, _as_object) for turn in turns]


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
