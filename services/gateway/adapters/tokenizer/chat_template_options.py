"""What an operator sets of the chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from services.common.errors import FailedPrecondition

_FLAG = "--chat-template"
_MARKS_OF_TEXT = "{}\n"
"""Characters of a template's text that a path does not have."""


@dataclass(frozen=True, slots=True)
class ChatTemplateOptions:
    """The template of conversations and what it is given."""

    template: str | None = None
    """A file, or the text of a template, in place of the model's; None: the model's."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables that a request may change."""
    content_format: str = "auto"
    """The form in which the template gets the content of turns."""

    def read_template(self) -> str | None:
        """The text of the template; None if it is the model's. As in vLLM a setting without braces
        and line breaks is a file. Raises FailedPrecondition for a file that cannot be read, and for
        a text that is no template.
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
    """Raises FailedPrecondition for a text with an error of syntax."""
    # Here, since transformers takes a fifth of a second to import.
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415
        _compile_jinja_template,  # the tags of templates are defined there
    )

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise FailedPrecondition(
            f"{_FLAG}: line {error.lineno} of the template: {error.message}"
        ) from error
