"""The operator's settings of the chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from services.common.errors import FailedPrecondition

_FLAG = "--chat-template"
_MARKS_OF_TEXT = "{}\n"
"""A setting with one of these characters is the text of a template, and not a path."""


@dataclass(frozen=True, slots=True)
class ChatTemplateOptions:
    template: str | None = None
    """The path of a file, or the text of a template. None selects the model's template."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Default variables of the template, which a request may override."""
    content_format: str = "auto"
    """The format of messages' content that the template expects: string, openai (a list of parts),
    or auto (derived from the template).
    """

    def read_template(self) -> str | None:
        """Returns the text of the template. Returns None if the operator specified no template.

        As in vLLM, a setting without braces and line breaks is the path of a file. Raises
        FailedPrecondition if the file cannot be read or the template is invalid.
        """
        text = self.template
        if text is None:
            return None
        if not any(mark in text for mark in _MARKS_OF_TEXT):
            try:
                text = Path(text).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise FailedPrecondition(f"{_FLAG}: {text} cannot be read: {why}") from error
        _check(text)
        return text


def _check(text: str) -> None:
    # Imported here, since importing transformers takes 0.2 s.
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415
        _compile_jinja_template,  # knows the extra tags of chat templates
    )

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise FailedPrecondition(
            f"{_FLAG}: line {error.lineno} of the template: {error.message}"
        ) from error
