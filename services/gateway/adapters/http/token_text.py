"""A single token as answers write it: as text where it is text, as bytes where it is not."""

from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that knows what a token stands for."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""
        ...


class TokenText:
    """Tokens one at a time, as log-probabilities name them."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer

    def raw(self, token_id: int) -> bytes:
        """The token's bytes."""
        return self._tokenizer.token_bytes(token_id)

    def written(self, token_id: int) -> str:
        """The token's text; `bytes:\\xe2\\x80` for a piece of a character, as OpenAI writes it."""
        raw = self.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
