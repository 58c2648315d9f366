"""Tokens to text as they come, never half a character.

A token may end inside a character: its bytes are held back until the character is whole. Two ways,
by what the tokenizer is:

* byte-level (GPT-2, Llama 3, Qwen): text is the concatenation of the tokens' bytes, so one
  incremental UTF-8 decoder does it, exactly and in constant time per token;
* any other: decode a short window with and without the new tokens and take the difference, as
  text-generation-inference and vLLM do. The window starts a few tokens back, since a token's text
  may depend on its neighbours.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from services.gateway.core.ports import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, hence at most four tokens.
_MAX_TOKENS_OF_CHARACTER = 4
_CONTEXT_TOKENS = 6
_MAX_SILENT_TOKENS = 24
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))


class Detokenizer(Protocol):
    """Text of one sequence, piece by piece."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        ...

    def flush(self) -> str:
        """What is held back and is text all the same; a cut character is dropped."""
        ...


def new_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> Detokenizer:
    """A detokenizer for what follows the prompt."""
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A prompt of token ids may end inside a character, which the output then completes.
        self.feed(prompt_token_ids[-_MAX_TOKENS_OF_CHARACTER:])

    def feed(self, token_ids: Sequence[int]) -> str:
        skipped, bytes_of = self._skipped, self._bytes_of
        return self._decoder.decode(
            b"".join([bytes_of(token) for token in token_ids if token not in skipped])
        )

    def flush(self) -> str:
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """For every other tokenizer, through `decode` alone.

    `_window[:_read]` is the context: tokens whose text was given out, beginning and ending with a
    whole character; `_window[_read:]` waits for its character to be whole.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        while self._window and tokenizer.token_bytes(self._window[0])[:1] in _CONTINUATIONS:
            del self._window[0]
        # A prompt of token ids may end inside a character, which the output then completes.
        self._read = len(self._window) - _num_open_tokens(tokenizer, self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token) for token in token_ids])

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        num_waiting = len(self._window) - self._read
        if not text:
            if num_waiting > _MAX_SILENT_TOKENS:
                del self._window[self._read :]
            return ""
        if text.endswith(_REPLACEMENT) and _num_open_tokens(self._tokenizer, self._window):
            return ""
        # What was just given out is the next context.
        del self._window[: self._read]
        self._read = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        if _num_open_tokens(self._tokenizer, self._window):
            text = text.rstrip(_REPLACEMENT)
        self._read = len(self._window)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _num_open_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> int:
    """How many of the last tokens belong to a character that is not whole yet."""
    raw = b""
    for count, token in enumerate(reversed(token_ids[-_MAX_TOKENS_OF_CHARACTER:]), start=1):
        raw = tokenizer.token_bytes(token) + raw
        if raw[:1] not in _CONTINUATIONS:
            # 110xxxxx begins two bytes, 1110xxxx three, 11110xxx four.
            lead = raw[0] if raw else 0
            length = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
            return count if len(raw) < length else 0
    return 0
