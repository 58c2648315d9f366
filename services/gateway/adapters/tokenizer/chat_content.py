"""Converts the content of messages to the format that a chat template expects: a string, or a list
of parts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from jinja2 import TemplateError, nodes

T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]
_MAX_LOOKED_FOR = 32
_FIRST_TURN = frozenset({"system", "developer"})
"""Some templates expect messages of these roles as a string, and all others as lists of parts."""


def render_content(
    render: Callable[[Messages], str], messages: Messages, template: str, form: str
) -> str:
    """Renders messages with `render`. A message's content is a text, or a list of texts. `form` is
    the format that the template expects: string for a text, openai for a list of parts, or auto if
    the format is derived from the template.

    As in vLLM, texts are joined with a line feed if the template expects a string, and a template
    that iterates over the content expects parts. If `form` is auto and the prompt lacks the last
    message's text or contains a Python list, the messages are rendered again in other formats. If
    no prompt is complete, the first prompt is returned. If the template raised an error in every
    format, the first error is raised.
    """
    first, *others = _forms(messages, template, form)
    error: Exception | None = None
    prompt = ""
    try:
        prompt = render(first)
        if not others or _is_whole(prompt, messages):
            return prompt
    except Exception as raised:
        error = raised
    for other in others:
        try:
            second = render(other)
        except Exception:  # A template may raise any error about an unexpected format.
            continue
        if _is_whole(second, messages):
            return second
    if error is not None:
        raise error
    return prompt


def holds_all(prompt: str, texts: Sequence[str]) -> bool:
    """Whether a prompt contains each of these texts (see `_some`), either unchanged or escaped as
    in JSON.
    """
    return all(_holds(prompt, text) for text in _some(texts))


def _some(items: Sequence[T]) -> Sequence[T]:
    """Returns the first and the last items if there are many. To search a long prompt for thousands
    of texts would take seconds, and a template treats similar texts in the same way.
    """
    num_at_each_end = _MAX_LOOKED_FOR // 2
    is_many = len(items) > _MAX_LOOKED_FOR
    return [*items[:num_at_each_end], *items[-num_at_each_end:]] if is_many else items


def _holds(prompt: str, text: str) -> bool:
    bare = text.strip()
    if bare in prompt:
        return True
    escaped = json.dumps(bare)[1:-1], json.dumps(bare, ensure_ascii=False)[1:-1]
    return any(written in prompt for written in escaped)


def texts_of(content: str | Sequence[str]) -> list[str]:
    return [content] if isinstance(content, str) else list(content)


def _forms(messages: Messages, template: str, form: str) -> Iterator[Messages]:
    """Yields the messages in each format to try, the most likely format first."""
    if form == "string":
        yield _written(messages, _joined)
    elif form == "openai":
        yield _written(messages, _parts)
    elif iterates_over_content(template):
        yield _written(messages, _parts)
        if messages[0]["role"] in _FIRST_TURN:
            yield [*_written(messages[:1], _joined), *_written(messages[1:], _parts)]
        yield _written(messages, _joined)
    else:
        yield _written(messages, _joined)
        yield _written(messages, _parts)
        yield _written(messages, lambda texts: _parts([_joined(texts)]))


def _written(messages: Messages, write: Callable[[list[str]], object]) -> Messages:
    return [{**turn, "content": write(texts_of(turn["content"]))} for turn in messages]


def _joined(texts: list[str]) -> str:
    return "\n".join(texts)


def _parts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _is_whole(prompt: str, messages: Messages) -> bool:
    if not holds_all(prompt, texts_of(messages[-1]["content"])):
        return False
    return not any(str(_parts(texts_of(turn["content"]))) in prompt for turn in _some(messages))


@lru_cache(16)
def iterates_over_content(template: str) -> bool:
    """Whether a chat template has a loop over the content of a message.

    A message is recognized as the variable of a loop over `messages`, or over a variable to which
    `messages` was assigned. This is the rule of vLLM's `_detect_content_format`.
    """
    # Imported here, since the import takes 0.1 s and only this function needs it.
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415
        _compile_jinja_template,
    )

    try:
        root = _compile_jinja_template(template).environment.parse(template)
    except TemplateError:
        return False
    turns = {
        loop.target.name
        for name in _names_of(root, "messages")
        for loop in root.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _is_name(_bare(loop.iter), name)
    }
    return any(_is_content(_bare(loop.iter), turns) for loop in root.find_all(nodes.For))


def _names_of(root: nodes.Template, name: str) -> set[str]:
    """Returns a variable's name, and the names of variables to which it or a part of it was
    assigned.
    """
    names, found = {name}, {name}
    while found:
        found = {
            assigned.target.name
            for assigned in root.find_all(nodes.Assign)
            if isinstance(assigned.target, nodes.Name)
            and any(_is_name(_bare(assigned.node), known) for known in found)
        } - names
        names |= found
    return names


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Returns the expression to which filters, tests and slices are applied."""
    while True:
        is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if not is_slice and not isinstance(node, nodes.Filter | nodes.Test):
            return node
        node = node.node  # type: ignore[union-attr]


def _is_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _is_content(node: nodes.Node | None, turns: set[str]) -> bool:
    """Whether a node is the content of a message. `turns` are the variables that have messages."""
    if isinstance(node, nodes.Getattr):
        key: object = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and any(_is_name(node.node, name) for name in turns)
