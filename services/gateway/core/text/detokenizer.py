"""Converts tokens to text incrementally, without splitting characters.

The joined pieces of text equal the tokenizer's `decode` of all tokens, but an incomplete character
at the end is omitted. If a token ends inside a character, the character's bytes are held back until
the character is complete. There are two methods for two kinds of tokenizers:

* Byte-level tokenizers (GPT-2, Llama 3, Qwen): the text is the concatenation of the tokens' bytes.
  An incremental UTF-8 decoder converts the bytes in constant time per token.
* Other tokenizers: a short window of tokens is decoded with and without the new tokens, and the
  difference is the new text, as in text-generation-inference and vLLM. The window starts a few
  tokens before the new tokens, since a token's text may depend on the tokens before it. Some of
  these tokenizers have byte tokens (SentencePiece's byte fallback: Llama 2, Mistral, Gemma).
  `decode` converts a run of consecutive byte tokens to characters if the whole run is valid UTF-8,
  and otherwise to one replacement character per byte. So a run is held back until it ends.
"""

import codecs
from collections.abc import Sequence

from services.gateway.core.ports import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_TOKENS_OF_CHARACTER = 4
"""A character has at most four bytes in UTF-8, and each of its tokens has at least one byte."""
_CONTEXT_TOKENS = 6
"""Number of prompt tokens in the first window, since they may affect the first output's text."""
_MAX_SILENT_TOKENS = 24
"""If more consecutive tokens than this have no text, these tokens are removed from the window."""
_SPACE = 0x20


class ByteDetokenizer:
    """Converts the tokens of one sequence, for tokenizers whose tokens are byte strings."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_characters = 0
        self.feed(prompt_token_ids[-_MAX_TOKENS_OF_CHARACTER:])
        self.num_characters = 0

    def feed(self, token_ids: Sequence[int]) -> str:
        """Returns the characters that these tokens complete."""
        skipped, bytes_of = self._skipped, self._bytes_of
        text = self._decoder.decode(
            b"".join([bytes_of(token) for token in token_ids if token not in skipped])
        )
        self.num_characters += len(text)
        return text

    def flush(self) -> str:
        """Returns the text that is still held back at the end, without an incomplete character."""
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """Converts the tokens of one sequence, for tokenizers whose tokens are not byte strings.

    `_window[:_read]` is the context: tokens whose text was returned, or the end of the prompt.
    `_window[_read:]` are tokens whose text was not returned yet. `_run` has the bytes of the
    current run of byte tokens. When a run has ended, the window keeps only its last byte token.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        # `decode` skips either all special tokens or none.
        self._skip_special_tokens = skipped == tokenizer.special_ids
        self._num_given_characters = 0
        self._run = _ByteRun()
        open_ids = _open_tokens(tokenizer, prompt_token_ids[-_MAX_TOKENS_OF_CHARACTER:])
        closed = prompt_token_ids[: len(prompt_token_ids) - len(open_ids)]
        self._window = list(closed[-_CONTEXT_TOKENS:])
        self._read = len(self._window)
        self.feed(open_ids)

    @property
    def num_characters(self) -> int:
        """Number of characters of the text so far, including characters that are held back."""
        return self._num_given_characters + self._run.num_whole_characters

    def feed(self, token_ids: Sequence[int]) -> str:
        text = "".join([self._step(token) for token in token_ids])
        self._num_given_characters += len(text)
        return text

    def _step(self, token_id: int) -> str:
        if token_id in self._skipped or not self._tokenizer.token_bytes(token_id):
            return ""  # `decode` skips this token, too, so the token does not end a run.
        byte = self._tokenizer.byte_values.get(token_id)
        if byte is not None:
            self._run.append(token_id, byte)
            return ""
        return self._end_run() + self._plain_text(token_id)

    def _plain_text(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        num_waiting = len(self._window) - self._read
        if not text:
            if num_waiting > _MAX_SILENT_TOKENS:
                del self._window[self._read :]
            return ""
        if self._may_be_cut(text) and num_waiting < _MAX_TOKENS_OF_CHARACTER:
            return ""
        # The tokens of the text that is returned now are the next context.
        del self._window[: self._read]
        self._read = len(self._window)
        return text

    def _may_be_cut(self, text: str) -> bool:
        """Whether `text` may end inside a character that further tokens complete."""
        return not self._tokenizer.byte_values and text.endswith(_REPLACEMENT)

    def _end_run(self) -> str:
        if not self._run.values:
            return ""
        run, self._run = self._run, _ByteRun()
        text = run.text()
        if run.values[0] == _SPACE and text[0] == " ":
            # Decodes the context, too, because `decode` may drop a space at the start of a text.
            before = self._decode(self._window)
            if self._decode([*self._window, run.first_id]) == before:
                text = text[1:]
        self._window, self._read = [run.last_id], 1
        return text

    def flush(self) -> str:
        if self._run.values:
            self._run.drop_cut_character()
            text = self._end_run()
        else:
            text = self._new_text()
            if self._may_be_cut(text):
                text = text.rstrip(_REPLACEMENT)
            self._read = len(self._window)
        self._num_given_characters += len(text)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._read])
        return self._decode(self._window)[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def new_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
    shown: frozenset[int] = frozenset(),
) -> ByteDetokenizer | WindowDetokenizer:
    """Makes a detokenizer for the output after a prompt. Special tokens in `shown` are never
    skipped. If the prompt's tokens end inside a character, the output may complete it.
    """
    skipped = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, prompt_token_ids, skipped)
    return WindowDetokenizer(tokenizer, prompt_token_ids, skipped)


def echoed(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """Returns the text of a prompt, including special tokens, and the position in characters at
    which each token starts.

    A token that contains only part of a character starts where the character starts. An incomplete
    character at the prompt's end is omitted, since it becomes part of the answer.
    """
    detokenizer = new_detokenizer(tokenizer, (), skip_special_tokens=False)
    pieces, offsets = [], []
    for token in token_ids:
        offsets.append(detokenizer.num_characters)
        pieces.append(detokenizer.feed((token,)))
    pieces.append(detokenizer.flush())
    return "".join(pieces), offsets


class _ByteRun:
    """The bytes of consecutive byte tokens."""

    def __init__(self) -> None:
        self.values = bytearray()
        self.first_id = self.last_id = -1
        self.num_whole_characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_id: int, byte: int) -> None:
        if not self.values:
            self.first_id = token_id
        self.last_id = token_id
        self.values.append(byte)
        self.num_whole_characters += len(self._decoder.decode(bytes([byte])))

    def text(self) -> str:
        try:
            return self.values.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(self.values)

    def drop_cut_character(self) -> None:
        """Removes the bytes of an incomplete character from the end of `values`."""
        pending, _ = self._decoder.getstate()
        del self.values[len(self.values) - len(pending) :]


def _open_tokens(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    """Returns the byte tokens of an incomplete character at the end of `token_ids`."""
    run = _ByteRun()
    for token in token_ids:
        byte = tokenizer.byte_values.get(token)
        if byte is None:
            run = _ByteRun()
        else:
            run.append(token, byte)
    num_bytes = len(run.values)
    run.drop_cut_character()
    return token_ids[len(token_ids) - num_bytes + len(run.values) :]
