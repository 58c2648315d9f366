"""The text parts of messages, and the arguments and results of earlier tool calls, in request
bodies of all APIs.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, Tag, ValidationInfo

from services.gateway.adapters.http.exchange.cache_wishes import CacheBreakpoint, MarkedBody
from services.gateway.adapters.http.exchange.fields import (
    BodyNotes,
    choice,
    text_or_list,
    text_or_object,
)

TextType = Literal[
    "text", "input_text", "output_text", "refusal", "thinking", "reasoning_text", "summary_text"
]
THOUGHTS = frozenset({"thinking", "reasoning_text", "summary_text"})
"""The types of parts that contain the assistant's thinking."""


def _as_text(value: Any) -> Any:
    """Converts a value to a text. Null becomes an empty text. The texts of a list of parts are
    joined, because Mistral's clients send thoughts as such a list.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        texts = [part["text"] for part in value if isinstance(part, dict) and "text" in part]
        are_texts = len(texts) == len(value) and all(isinstance(text, str) for text in texts)
        return "".join(texts) if are_texts else value
    return value


PartText = Annotated[str, BeforeValidator(_as_text)]


class TextPart(MarkedBody):
    """A text part of a message. Its text has the key `text`, `refusal` or `thinking`."""

    type: TextType
    text: PartText = Field(validation_alias=AliasChoices("text", "refusal", "thinking"))
    prompt_cache_breakpoint: CacheBreakpoint | None = None


def _as_part(value: Any) -> Any:
    return {"type": "text", "text": value} if isinstance(value, str) else value


TextOrParts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[Annotated[TextPart, BeforeValidator(_as_part)]], Field(fail_fast=True), Tag("<list>")
    ],
    choice(text_or_list, "must be a string or a list of parts"),
]

_MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "document": "document",
    "file": "file",
    "input_file": "file",
    "audio": "audio",
    "input_audio": "audio",
}
"""Maps the part types of all APIs that are not text to the words that replace the parts."""


def without_media(content: Any, info: ValidationInfo) -> Any:
    """Replaces each image, document or file in a tool's result by a text, such as `[image omitted:
    this server reads text only]`. If these parts were refused, an agent whose tool returns an image
    could not continue, because it sends the result again in each later request. A header of the
    answer lists the types of the replaced parts.
    """
    if not isinstance(content, list):
        return content
    return [_as_readable(part, info) for part in content]


def _as_readable(part: Any, info: ValidationInfo) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _MEDIA:
        return part
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "text":  # Anthropic's plain text
        return {"type": "text", "text": source.get("data")}
    if isinstance(info.context, BodyNotes):
        info.context.ignored.append(kind)
    return {"type": "text", "text": f"[{_MEDIA[kind]} omitted: this server reads text only]"}


Result = Annotated[TextOrParts | None, BeforeValidator(without_media)]
"""The result of a tool call."""


def said(content: str | Sequence[TextPart] | None) -> list[str]:
    """Returns the texts of a content's parts, without thoughts."""
    return _texts(content, without=THOUGHTS)


def read(content: str | Sequence[TextPart] | None) -> list[str]:
    """Returns the texts of all parts of a content. It is used for turns that are not the
    assistant's, in which parts with a thought's type are ordinary text.
    """
    return _texts(content, without=frozenset())


def _texts(content: str | Sequence[TextPart] | None, without: frozenset[str]) -> list[str]:
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    return [part.text for part in content if part.type not in without]


def thought(content: str | Sequence[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return ""
    return "".join(part.text for part in content if part.type in THOUGHTS)


Arguments = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    choice(text_or_object, "must be a string or an object"),
]
"""The arguments of an earlier tool call: the text that the model wrote, or an object."""


def called_arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any] | str:
    """Converts arguments to an object, which chat templates expect. A text that is not a JSON
    object is returned unchanged. None, an empty text and JSON's null become an empty object.
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
    """Whether an object that was read from `text` can be encoded in UTF-8. An object with a single
    surrogate cannot.
    """
    if "\\ud" not in text.lower():
        return True
    try:
        json.dumps(read, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
