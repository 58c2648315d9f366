"""Converts texts of clients to tokens, within the limits of the model and of one request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidArgument, OutOfRange, StepwellError
from services.common.request.sampling_limits import MAX_BAD_WORDS, MAX_BAD_WORDS_CHARACTERS
from services.gateway.core.ports import TextTooLong, Tokenizer
from services.gateway.core.request.model_limits import ModelLimits
from services.gateway.core.request.request_check import (
    answer_too_long,
    of_prompt,
    prompt_too_long,
)
from services.gateway.core.truncation import Truncation, truncation


@dataclass(eq=False)
class Tokenization:
    """Calls the tokenizer, and checks the numbers of characters and tokens."""

    tokenizer: Tokenizer
    limits: Callable[[], ModelLimits]
    """Returns the model's limits, or raises Unavailable."""
    max_items: int
    """Limit on the number of items in a list of tokens of a request or an answer."""

    def check_num_items(self, field: str, num_items: int) -> None:
        """Raises OutOfRange if a field has too many values for one request."""
        if num_items > self.max_items:
            raise OutOfRange(
                f"{field} has {num_items} items; a request may have at most {self.max_items}",
                field=field,
            )

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, kept: Truncation | None = None
    ) -> list[list[int]]:
        """Returns the token ids of prompts. If `kept` is given, the prompts are truncated.
        Otherwise raises OutOfRange if a prompt does not fit into the context.
        """
        limits = self.limits()
        if kept is not None:
            prompts = [(text,) for text in texts]
            encoded = await self.tokenizer.encode_truncated(
                prompts, kept, add_special_tokens=add_special_tokens
            )
            return [token_ids for token_ids, _ in encoded]
        self._check_lengths([*map(len, texts)], limits)
        try:
            return await self.tokenizer.encode(
                texts, add_special_tokens=add_special_tokens, max_tokens=limits.capacity
            )
        except TextTooLong as error:
            raise _too_long(error, limits, len(texts)) from error

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], kept: Truncation | None = None
    ) -> list[tuple[list[int], int]]:
        """Returns, for each pair of texts, the token ids of one prompt with both texts, and the
        number of tokens before the second text. Truncates or raises OutOfRange like `encode`.
        """
        limits = self.limits()
        if kept is not None:
            return await self.tokenizer.encode_truncated(pairs, kept, add_special_tokens=True)
        self._check_lengths([len(first) + len(second) for first, second in pairs], limits)
        try:
            return await self.tokenizer.encode_pairs(pairs, max_tokens=limits.capacity)
        except TextTooLong as error:
            raise _too_long(error, limits, len(pairs)) from error

    def truncation(
        self, num_tokens: int | None, side: str | None, max_tokens: int | None = None
    ) -> Truncation | None:
        """Returns the truncation of prompts to `num_tokens`, or None if `num_tokens` is None.
        `max_tokens` is the maximum length of the answer. `side` ("left" or "right") is the side
        from which tokens are removed. If `side` is None, it is "left" if the model generates text,
        and "right" if the model computes a vector.
        """
        if num_tokens is None:
            return None
        limits = self.limits()
        most = limits.max_prompt_tokens
        if limits.pooler is None and max_tokens is not None:
            most = limits.capacity - max_tokens
            if most < 1:
                raise answer_too_long(max_tokens, limits)
        keeps_end = limits.pooler is None if side is None else side == "left"
        return truncation(num_tokens, most, keeps_end=keeps_end)

    def _check_lengths(self, lengths: Sequence[int], limits: ModelLimits) -> None:
        """Raises OutOfRange if a text has so many characters that its tokens cannot fit into the
        context. `lengths` are the texts' numbers of characters.
        """
        longest = limits.capacity * self.tokenizer.max_token_bytes
        for number, length in enumerate(lengths):
            if length > longest:
                error = prompt_too_long(f"{length} characters", limits)
                raise of_prompt(error, number, len(lengths))

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of any text. Raises OutOfRange if there are more tokens than one
        answer may list.
        """
        try:
            [token_ids] = await self.tokenizer.encode(
                [text], add_special_tokens=add_special_tokens, max_tokens=self.max_items
            )
        except TextTooLong as error:
            raise OutOfRange(
                f"prompt has more than {self.max_items} tokens, the most that an answer may have",
                field="prompt",
            ) from error
        return token_ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids. Raises OutOfRange if there are more tokens than one
        request may list.
        """
        self.check_num_items("tokens", len(token_ids))
        return await self.tokenizer.detokenize(token_ids)

    async def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Returns the token sequences of words that must not appear in an answer. Each word is
        tokenized without and with a space before it. By vLLM's rule, the result with the space is
        used only if it differs in the first token and not in length.
        """
        if not words:
            return ()
        if len(words) > MAX_BAD_WORDS:
            raise InvalidArgument(
                f"bad_words has {len(words)} entries; at most {MAX_BAD_WORDS} are allowed",
                field="bad_words",
            )
        if sum(map(len, words)) > MAX_BAD_WORDS_CHARACTERS:
            raise InvalidArgument(
                f"bad_words may have at most {MAX_BAD_WORDS_CHARACTERS} characters in all",
                field="bad_words",
            )
        bare = [word.lstrip() for word in words]
        texts = [*bare, *(" " + word for word in bare)]
        token_ids = await self.tokenizer.encode(
            texts, add_special_tokens=False, max_tokens=4 * MAX_BAD_WORDS_CHARACTERS
        )
        sequences: list[tuple[int, ...]] = []
        for plain, spaced in zip(token_ids[: len(bare)], token_ids[len(bare) :], strict=True):
            sequences.append(tuple(plain))
            if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences.append(tuple(spaced))
        return tuple(sequences)


def _too_long(error: TextTooLong, limits: ModelLimits, num_texts: int) -> StepwellError:
    about = "" if error.is_exact else "more than "
    refusal = prompt_too_long(f"{about}{error.num_tokens} tokens", limits)
    return of_prompt(refusal, error.number, num_texts)
