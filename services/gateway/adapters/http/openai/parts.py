"""Text parts of messages and arguments of calls, as clients of all APIs send them back."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from services.gateway.adapters.http.exchange.fields import HistoryBody, text_or_list, text_or_object

TextType = Literal[
    "text",
    "input_text",
    "output_text",
    "refusal",
    "thinking",
    "reasoning_text",
    "summary_text",
]
THOUGHTS = frozenset({"thinking", "reasoning_text", "summary_text"})
"""Types of the parts that contain the assistant's thinking."""


def _as_text(value: Any) -> Any:
    """Converts a value to a text. Null becomes an empty text. A list of text parts, such as
    Mistral's thoughts, is joined.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        texts = [part["text"] for part in value if isinstance(part, dict) and "text" in part]
        are_texts = len(texts) == len(value) and all(isinstance(text, str) for text in texts)
        return "".join(texts) if are_texts else value
    return value


PartText = Annotated[str, BeforeValidator(_as_text)]


class TextPart(HistoryBody):
    """A text part of a message. The key of the text depends on the type."""

    type: TextType
    text: PartText = Field(validation_alias=AliasChoices("text", "refusal", "thinking"))


def _as_part(value: Any) -> Any:
    """Converts a plain text to a text part, as vLLM does."""
    return {"type": "text", "text": value} if isinstance(value, str) else value


TextOrParts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[Annotated[TextPart, BeforeValidator(_as_part)]],
        Field(fail_fast=True),
        Tag("<list>"),
    ],
    Discriminator(
        text_or_list,
        custom_error_type="alternative",
        custom_error_message="must be a string or a list of parts",
    ),
]


def said(content: str | Sequence[TextPart] | None) -> list[str]:
    """The texts of a content's parts, without thoughts."""
    return _texts(content, without=THOUGHTS)


def read(content: str | Sequence[TextPart] | None) -> list[str]:
    """The texts of a content's parts, with thoughts. For roles other than the assistant, parts that
    are marked as thoughts count as text, too.
    """
    return _texts(content, without=frozenset())


def _texts(content: str | Sequence[TextPart] | None, without: frozenset[str]) -> list[str]:
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    return [part.text for part in content if part.type not in without]


def thought(content: str | Sequence[TextPart] | None) -> str:
    """The joined text of a content's thoughts."""
    if content is None or isinstance(content, str):
        return ""
    return "".join(part.text for part in content if part.type in THOUGHTS)


Arguments = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(
        text_or_object,
        custom_error_type="alternative",
        custom_error_message="must be a string or an object",
    ),
]
"""Arguments of an earlier call: the text that the model wrote, or an object."""


def called_arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any] | str:
    """Arguments as chat templates expect them: an object. A text that is no JSON object is
    unchanged. None, an empty text and JSON's null mean no arguments.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        read = json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError):
        return arguments
    if read is None:
        return {}
    return read if isinstance(read, dict) and _can_be_written(arguments, read) else arguments


def _can_be_written(text: str, read: dict[str, Any]) -> bool:
    """Whether an object can be encoded: half of a surrogate pair cannot."""
    if "\\ud" not in text.lower():
        return True
    try:
        json.dumps(read, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
