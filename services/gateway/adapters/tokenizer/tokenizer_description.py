"""A tokenizer's configuration as JSON, in the format of vLLM's /tokenizer_info."""

from collections.abc import Mapping
from typing import Any

_PATHS = ("_file", "name_or_path")


def described(tokenizer: Any) -> Mapping[str, Any]:
    """Returns the content of tokenizer_config.json without paths, and the chat template in use."""
    configured = {
        name: _plain(value)
        for name, value in tokenizer.init_kwargs.items()
        if not name.endswith(_PATHS)
    }
    template = tokenizer.chat_template
    of_chat = {} if template is None else {"chat_template": template}
    return {**configured, "tokenizer_class": type(tokenizer).__name__, **of_chat}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return getattr(value, "content", str(value))
