"""Counts the tokens of a text with the server's /tokenize or with a local tokenizer file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.cli.client import Client
from services.cli.errors import CommandError

CountTokens = Callable[[str], int]
"""Returns the number of tokens of a text, without special tokens such as BOS."""


def server_counter(client: Client, model: str) -> CountTokens | None:
    """Returns a counter that calls the server's /tokenize, or None if the server has no such route.
    The request schema is vLLM's, which SGLang and this project also use, or else llama.cpp's.
    """
    for form in (_vllm_form, _llamacpp_form):

        def count(text: str, form: Callable[[str, str], dict[str, Any]] = form) -> int:
            return _num_tokens(client.post_json("/tokenize", form(model, text)))

        try:
            if count("how many tokens") > 0:
                return count
        except CommandError:
            continue
    return None


def _vllm_form(model: str, text: str) -> dict[str, Any]:
    return {"model": model, "prompt": text, "add_special_tokens": False}


def _llamacpp_form(_model: str, text: str) -> dict[str, Any]:
    return {"content": text, "add_special": False}


def _num_tokens(answer: Any) -> int:
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return len(tokens) if isinstance(tokens, list) else 0


def local_counter(directory: Path) -> CountTokens:
    """Returns a counter that uses `tokenizer.json` of a directory. Raises CommandError."""
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - other commands do not need it
    except ImportError:
        raise CommandError("--tokenizer needs tokenizers: pip install tokenizers") from None
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CommandError(f"--tokenizer {directory} holds no tokenizer.json", exit_status=2)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exceptions
        raise CommandError(f"--tokenizer: {file} cannot be read: {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
