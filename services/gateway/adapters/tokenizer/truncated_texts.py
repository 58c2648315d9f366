"""Encodes texts with truncation. As in transformers, special tokens are added after truncation."""

from typing import Any

from services.gateway.core.truncation import Truncation, lengths_kept

_CHARACTERS_PER_TOKEN = 8
_MARGIN_TOKENS = 64
"""If only a part of a text is encoded, this number of tokens next to the cut may be wrong."""


def truncated(
    backend: Any, texts: tuple[str, ...], kept: Truncation, *, add_special_tokens: bool
) -> Any:
    """Returns the truncated Encoding of a prompt of one or two texts. `backend` is a Tokenizer of
    the tokenizers package.
    """
    room = kept.num_tokens
    if add_special_tokens:
        room -= backend.num_special_tokens_to_add(len(texts) == 2)
    room = max(0, room)
    parts = [_needed(backend, text, room, keeps_end=kept.keeps_end) for text in texts]
    rooms = (room,) if len(parts) == 1 else lengths_kept([*map(len, parts)], room)
    direction = "left" if kept.keeps_end else "right"
    for part, most in zip(parts, rooms, strict=True):
        part.truncate(most, direction=direction)
    return backend.post_process(*parts, add_special_tokens=add_special_tokens)


def _needed(backend: Any, text: str, num_tokens: int, *, keeps_end: bool) -> Any:
    """Returns the encoding of a text, or of a part of it that has at least the tokens to keep."""
    num_characters = _CHARACTERS_PER_TOKEN * (num_tokens + _MARGIN_TOKENS)
    while num_characters < len(text):
        part = text[-num_characters:] if keeps_end else text[:num_characters]
        encoding = backend.encode(part, add_special_tokens=False)
        if len(encoding) >= num_tokens + _MARGIN_TOKENS:
            return encoding
        num_characters *= 2
    return backend.encode(text, add_special_tokens=False)
