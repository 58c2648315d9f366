"""A prompt given as the embeddings of its tokens instead of the tokens.

Whoever holds no tensors carries the numbers as bytes: it checks their amount, and gives them a
name for the prefix cache. Tokens of such a prompt are all 0 wherever a token must stand.
"""

import enum
from dataclasses import dataclass
from hashlib import sha256

from services.common.errors import InvalidArgument

PLACEHOLDER_TOKEN = 0


class EmbedsDtype(enum.Enum):
    """How numbers are stored, by the name that safetensors has for it."""

    FLOAT32 = "F32"
    BFLOAT16 = "BF16"
    FLOAT16 = "F16"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self is EmbedsDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Rows of a matrix [num_tokens, hidden_size], little-endian.

    Making one raises InvalidArgument where there are no rows, or more of them than numbers: how
    many tokens it stands for is bounded by its bytes.
    """

    num_tokens: int
    dtype: EmbedsDtype
    data: bytes

    def __post_init__(self) -> None:
        if not 0 < self.num_tokens * self.dtype.itemsize <= len(self.data):
            raise InvalidArgument(
                f"prompt_embeds has {self.num_tokens} rows in {len(self.data)} bytes",
                field="prompt_embeds",
            )

    @property
    def placeholders(self) -> list[int]:
        """The tokens that stand for it."""
        return [PLACEHOLDER_TOKEN] * self.num_tokens

    def rest(self, num_computed_tokens: int) -> "PromptEmbeds | None":
        """Its rows after the first ones; None where nothing is left."""
        if num_computed_tokens >= self.num_tokens:
            return None
        row = len(self.data) // self.num_tokens
        data = self.data[num_computed_tokens * row :]
        return PromptEmbeds(self.num_tokens - num_computed_tokens, self.dtype, data)

    def check(self, hidden_size: int) -> None:
        """Raises InvalidArgument unless it is a matrix of that width."""
        given, expected = len(self.data), self.num_tokens * hidden_size * self.dtype.itemsize
        if given != expected:
            raise InvalidArgument(
                f"prompt_embeds has {given} bytes; {self.num_tokens} rows of {hidden_size} numbers "
                f"in {self.dtype.value} are {expected}",
                field="prompt_embeds",
            )

    def salted(self, cache_salt: str) -> str:
        """A salt under which placeholders share cached blocks with these very numbers only."""
        digest = sha256(self.data).hexdigest()
        return f"{cache_salt}\0prompt_embeds {self.dtype.value} {digest}"
