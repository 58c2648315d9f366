"""The tokenizer of a Hugging Face model directory, through transformers and tokenizers."""

import asyncio
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.request.tokenizer_files import has_tokenizer
from services.gateway.adapters.tokenizer.chat_content import Messages, render_content, texts_of
from services.gateway.adapters.tokenizer.chat_template_options import ChatTemplateOptions
from services.gateway.adapters.tokenizer.tokenizer_description import described
from services.gateway.adapters.tokenizer.transformers_package import import_auto_tokenizer
from services.gateway.adapters.tokenizer.truncated_texts import truncated
from services.gateway.core.ports import TextTooLong
from services.gateway.core.truncation import Truncation

T = TypeVar("T")

_INLINE_CHARACTERS = 2048
"""Shorter texts are tokenized in the event loop's thread, since a switch to another thread would
cost more.
"""
_CHARACTERS_OF_MESSAGE = 128
"""Each message counts as this number of characters in addition to its text when the time for
rendering a conversation is estimated.
"""
_COUNTED_CHARACTERS_PER_TOKEN = 8
"""If a text has more characters per allowed token than this, it is first split into pieces, whose
tokens are counted.
"""
_PIECE_CHARACTERS = 2**16
_FILES = ("tokenizer.json", "tokenizer_config.json")
_MAX_TEMPLATE_MESSAGE = 300
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


class HfTokenizer:
    """Implements the core's Tokenizer. Calls the Rust tokenizer directly, which is thread-safe.

    Truncation and padding in tokenizer.json are disabled. They are settings for training, and would
    silently change a client's prompt.
    """

    def __init__(self, tokenizer: Any, chat_template: ChatTemplateOptions | None = None) -> None:
        """Raises FailedPrecondition if `chat_template` cannot be used."""
        self._chat = chat_template or ChatTemplateOptions()
        self._tokenizer = tokenizer
        if (template := self._chat.read_template()) is not None:
            tokenizer.chat_template = template
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, info in added.items() if info.special)
        decoder = self._backend.decoder
        described = json.loads(decoder.__getstate__()) if decoder is not None else {"type": ""}
        self.is_byte_level = described["type"] == "ByteLevel"
        steps = [step["type"] for step in described.get("decoders", (described,))]
        self.byte_values: Mapping[int, int] = (
            _byte_values(self._backend) if "ByteFallback" in steps else {}
        )
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.has_chat_template = tokenizer.chat_template is not None
        # A client cannot set variables with these names, which the server sets.
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved_variables = {"messages", "conversations", *parameters} - {"kwargs"}
        if reserved := self._reserved_variables & self._chat.variables.keys():
            raise FailedPrecondition(
                f"--default-chat-template-kwargs may not hold {min(reserved)!r}"
            )
        self._bytes = _token_bytes(self._backend, self.is_byte_level)
        for token_id, byte in self.byte_values.items():
            self._bytes[token_id] = bytes([byte])
        self.max_token_bytes = max(map(len, self._bytes))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_tokens: int
    ) -> list[list[int]]:
        def work() -> list[list[int]]:
            self._check_texts(enumerate(texts), max_tokens)
            # Faster than other methods, because it computes no offsets. Releases the GIL.
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            _check_encodings(encodings, max_tokens)
            return [encoding.ids for encoding in encodings]

        return await self._off_loop(sum(map(len, texts)), work)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_tokens: int
    ) -> list[tuple[list[int], int]]:
        def work() -> list[tuple[list[int], int]]:
            numbered = ((number, text) for number, pair in enumerate(pairs) for text in pair)
            self._check_texts(numbered, max_tokens)
            encodings = self._backend.encode_batch(list(pairs), add_special_tokens=True)
            _check_encodings(encodings, max_tokens)
            return [(encoding.ids, _second_text(encoding.type_ids)) for encoding in encodings]

        return await self._off_loop(sum(len(a) + len(b) for a, b in pairs), work)

    async def encode_truncated(
        self, prompts: Sequence[tuple[str, ...]], kept: Truncation, *, add_special_tokens: bool
    ) -> list[tuple[list[int], int]]:
        def work() -> list[tuple[list[int], int]]:
            encodings = (
                truncated(self._backend, texts, kept, add_special_tokens=add_special_tokens)
                for texts in prompts
            )
            return [(encoding.ids, _second_text(encoding.type_ids)) for encoding in encodings]

        return await self._off_loop(sum(len(text) for texts in prompts for text in texts), work)

    def _check_texts(self, texts: Iterable[tuple[int, str]], max_tokens: int) -> None:
        """Raises TextTooLong if a text has far too many tokens. The error has the text's number."""
        for number, text in texts:
            if len(text) > _COUNTED_CHARACTERS_PER_TOKEN * max_tokens:
                self._count(text, number, max_tokens)

    def _count(self, text: str, number: int, max_tokens: int) -> None:
        """Raises TextTooLong if a text has far too many tokens. Encodes the text in pieces, because
        encoding it as a whole would take a few hundred bytes of memory per token. The pieces have
        nearly as many tokens as the whole text, since only tokens at the cuts may differ.
        """
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[start : start + _PIECE_CHARACTERS]
            [encoding] = self._backend.encode_batch_fast([piece], add_special_tokens=False)
            num_tokens += len(encoding)
            if num_tokens > 2 * max_tokens:
                raise TextTooLong(max_tokens, number, is_exact=False)

    async def token_starts(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        offsets = await self.token_offsets(texts, add_special_tokens=add_special_tokens)
        return [_starts(of_text) for of_text in offsets]

    async def token_offsets(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[tuple[int, int]]]:
        def work() -> list[list[tuple[int, int]]]:
            encodings = self._backend.encode_batch(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.offsets for encoding in encodings]

        return await self._off_loop(sum(map(len, texts)), work)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if reserved := self._reserved_variables & variables.keys():
            raise InvalidArgument(
                f"chat_template_kwargs may not hold {min(reserved)!r}", field="chat_template_kwargs"
            )
        if not self.has_chat_template:
            raise InvalidArgument(
                "this model has no chat template; use completions instead", field="messages"
            )

        given_tools = list(tools) or None

        def render(written: Messages) -> str:
            text: str = self._tokenizer.apply_chat_template(
                list(written),
                tools=given_tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._chat.variables, **variables},
            )
            return text

        def work() -> str:
            template = self._tokenizer.get_chat_template(tools=given_tools)
            return render_content(render, messages, template, self._chat.content_format)

        texts = [text for message in messages for text in texts_of(message["content"])]
        size = _CHARACTERS_OF_MESSAGE * len(messages) + sum(map(len, texts))
        # Variables, tools and calls can make rendering slow even if the messages are short.
        has_calls = any("tool_calls" in message for message in messages)
        if variables or tools or has_calls or self._chat.variables:
            size += _INLINE_CHARACTERS
        try:
            return await self._off_loop(size, work)
        except Exception as error:
            # A template, which is a program, may raise any error about an unsupported conversation.
            raise _template_refusal(error, continues=continue_final_message) from error

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        def work() -> str:
            # This is the only decoding method that releases the GIL.
            [text] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=False)
            return str(text)

        return await self._off_loop(len(token_ids), work)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def token_name(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def description(self) -> Mapping[str, Any]:
        return described(self._tokenizer)

    def to_json(self) -> str:
        text: str = self._backend.to_str()
        return text

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        if size < _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _starts(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Returns, for each token, the number of characters before it in the text. `offsets` are the
    start and end of each token, which are equal for an added special token. There may be gaps
    between tokens, because some tokenizers exclude spaces from tokens.
    """
    starts, end = [], 0
    for first, last in offsets:
        starts.append(min(first, end) if last > first else end)
        end = max(end, last)
    return starts


def _second_text(type_ids: Sequence[int]) -> int:
    """Returns the index of the first token of the second text, which has token type 1. Returns 0 if
    all tokens have the same type.
    """
    return type_ids.index(1) if 1 in type_ids else 0


def _template_refusal(error: Exception, *, continues: bool) -> InvalidArgument:
    """Returns the client's error for an exception in a template. The exception's message is quoted
    only if the template itself raised the exception, and not jinja, Python or transformers.
    """
    if type(error) is TemplateError:
        why = " ".join(str(error).split())[:_MAX_TEMPLATE_MESSAGE]
        return InvalidArgument(
            f"the model's chat template refuses the messages: {why}", field="messages"
        )
    if continues and isinstance(error, ValueError):
        return InvalidArgument(
            "continue_final_message: the model's chat template changes the text of the final "
            "message, so the message cannot be continued",
            field="continue_final_message",
        )
    return InvalidArgument("the model's chat template cannot render the messages", field="messages")


def load_tokenizer(
    directory: Path, chat_template: ChatTemplateOptions | None = None
) -> HfTokenizer:
    """Reads the tokenizer files of a model directory. Raises FailedPrecondition if they are missing
    or damaged.
    """
    if not has_tokenizer(directory):
        raise FailedPrecondition(f"{directory} has no tokenizer.json")
    # The tokenizer needs no torch, so the warning of transformers about its absence is disabled.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # The tokenizer's own threads would compete with the event loop for the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Imported here, since it takes 0.2 s, and nothing else in this module needs it.
    auto_tokenizer = import_auto_tokenizer()
    try:
        tokenizer = auto_tokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise FailedPrecondition(
            f"{_damaged_file(directory)}: cannot load the tokenizer: {first_line}"
        ) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise FailedPrecondition(
            f"{directory}: transformers cannot load the tokenizer as tokenizer.json"
        )
    return HfTokenizer(tokenizer, chat_template)


def _damaged_file(directory: Path) -> Path:
    """Returns the first damaged tokenizer file, or the directory if all files can be parsed."""
    for path in (directory / name for name in _FILES):
        try:
            json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return path
    return directory


def _check_encodings(encodings: Sequence[Any], max_tokens: int) -> None:
    for number, encoding in enumerate(encodings):
        if len(encoding) > max_tokens:
            raise TextTooLong(len(encoding), number, is_exact=True)


def _token_bytes(backend: Any, is_byte_level: bool) -> list[bytes]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415

    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    added = backend.get_added_tokens_decoder()
    # GPT-2 represents each byte by a printable character.
    alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
    for token, token_id in vocabulary.items():
        raw = token.encode()
        if token_id not in added and not is_byte_level:
            raw = token.replace(_SPACE_MARK, " ").encode()
        elif token_id not in added and alphabet.keys() >= set(token):
            raw = bytes([alphabet[character] for character in token])
        table[token_id] = raw
    return table


def _byte_values(backend: Any) -> dict[int, int]:
    """Maps the ids of tokens like <0xE2> (SentencePiece's byte tokens) to bytes."""
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    return {
        token_id: int(match[1], 16)
        for token, token_id in vocabulary.items()
        if (match := _BYTE_TOKEN.fullmatch(token)) is not None
    }
