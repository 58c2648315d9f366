"""The interfaces to the core's environment: a clock, a prefix directory, grammars, a tokenizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from services.common.request.structured_outputs import StructuredOutputs
from services.gateway.core.truncation import Truncation

TIMER_SLACK_SECONDS = 0.001
"""An event loop may run a callback up to this number of seconds before its time."""


class Timer(Protocol):
    def cancel(self) -> None:
        """Cancels the callback. Idempotent."""


class Clock(Protocol):
    """Steady time in seconds, used for deadlines. asyncio's event loop implements it."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Calls `callback` at the time `when`, or soon if that time has passed."""


class PrefixDirectory(Protocol):
    """The prefixes that the KV-cache pools of all replicas have cached."""

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """Returns how many leading blocks of a prompt each node has cached. A node is the KV-cache
        pool of one replica. Nodes without cached blocks are omitted. `keys` are the keys of the
        prompt's blocks (hashes, defined in `services.common.pool.kv_directory`).
        """
        ...


class Grammars(Protocol):
    """Checks structured-output constraints."""

    async def check(
        self, wanted: StructuredOutputs, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Raises InvalidArgument if the constraint cannot be compiled for this vocabulary,
        ResourceExhausted if too many other constraints are being compiled, and Unavailable if the
        compiler was killed.
        """


class TextTooLong(Exception):
    """The text with index `number` is too long. It has `num_tokens` tokens, or at least
    `num_tokens` if `is_exact` is false.
    """

    def __init__(self, num_tokens: int, number: int, *, is_exact: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.number = number
        self.is_exact = is_exact


class Tokenizer(Protocol):
    """Converts text to tokens and back. Long work runs off the event loop."""

    is_byte_level: bool
    """Whether the text of tokens is exactly the concatenation of their `token_bytes`."""
    byte_values: Mapping[int, int]
    """Maps byte tokens (SentencePiece's byte fallback) to their bytes. The text of a byte token
    depends on the adjacent byte tokens. Tokenizers without byte tokens have an empty mapping.
    """
    special_ids: frozenset[int]
    """Ids of the special tokens, which are not text, such as end of sequence, roles and padding."""
    eos_token_id: int | None
    """The end-of-sequence token, or None if the tokenizer has no such token."""
    max_token_bytes: int
    has_chat_template: bool
    """Whether the model has a chat template, which `render_chat` needs."""

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_tokens: int
    ) -> list[list[int]]:
        """Returns the token ids of plain texts. Raises TextTooLong if a text has more than
        `max_tokens` tokens.
        """

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, max_tokens: int
    ) -> list[tuple[list[int], int]]:
        """Returns, for each pair of texts, the token ids of one prompt with both texts, and the
        number of tokens before the second text. This number is 0 if the tokenizer's token type ids
        do not distinguish the texts. Raises TextTooLong if a prompt has more than `max_tokens`
        tokens.
        """

    async def encode_truncated(
        self, prompts: Sequence[tuple[str, ...]], kept: Truncation, *, add_special_tokens: bool
    ) -> list[tuple[list[int], int]]:
        """Truncates prompts of one or two texts. Returns, for each prompt, the remaining token ids,
        and the number of tokens before the second text, or 0 if this number is not known.
        """

    async def token_starts(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Returns, for each text, the position in characters at which each token starts. A token
        that contains only part of a character starts where the character starts.
        """

    async def token_offsets(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[list[tuple[int, int]]]:
        """Returns, for each text, the start and end of each token in characters. An added special
        token has (0, 0).
        """

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Renders a conversation with the model's chat template. The content of each message is a
        text, or a list of texts, one for each content part.

        Raises InvalidArgument if the template does not accept the conversation.
        """

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of any number of token ids, including special tokens."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of a few token ids. Unknown ids have no text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token. The result is empty for an unknown id."""

    def description(self) -> Mapping[str, Any]:
        """Returns the tokenizer's configuration as JSON values, without file paths."""

    def token_name(self, token_id: int) -> str:
        """Returns the token's name in the vocabulary."""
