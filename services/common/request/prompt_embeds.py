"""A prompt given as the embeddings of its tokens instead of the tokens.

Services without tensors carry the numbers as bytes, check how many there are, and salt the prefix
cache with their digest. Where a token is needed, each token of such a prompt is 0.
"""

import enum
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from services.common.errors import InvalidArgument

PLACEHOLDER_TOKEN = 0
_CHECKED_BYTES = 2**18
"""Checked at once; a multiple of every number's size."""


class EmbedsDtype(enum.Enum):
    """How numbers are stored, by the name that safetensors has for it."""

    FLOAT32 = "F32"
    BFLOAT16 = "BF16"
    FLOAT16 = "F16"

    @property
    def itemsize(self) -> int:
        return 4 if self is EmbedsDtype.FLOAT32 else 2

    @property
    def lowest_exponent_bit(self) -> int:
        """Which bit of a number is the last of its exponent; the sign is the highest bit."""
        return {EmbedsDtype.FLOAT32: 23, EmbedsDtype.BFLOAT16: 7, EmbedsDtype.FLOAT16: 10}[self]


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Rows of a matrix [num_tokens, hidden_size], little-endian. Raises InvalidArgument if there
    are no rows, or more rows than numbers: the bytes bound the number of tokens.
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
        """Tokens in place of the rows."""
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

    def check_finite(self) -> None:
        """Raises InvalidArgument where a number is NaN or infinite. Some milliseconds per MB."""
        chunks = range(0, len(self.data), _CHECKED_BYTES)
        if not all(_is_finite(self.data[at : at + _CHECKED_BYTES], self.dtype) for at in chunks):
            raise InvalidArgument(
                "prompt_embeds holds NaN or infinity; every number must be finite",
                field="prompt_embeds",
            )

    def salted(self, cache_salt: str) -> str:
        """A salt under which placeholders share cached blocks with these very numbers only."""
        digest = sha256(self.data).hexdigest()
        return f"{cache_salt}\0prompt_embeds {self.dtype.value} {digest}"


def _is_finite(data: bytes, dtype: EmbedsDtype) -> bool:
    """Whether no number is infinite or NaN: of those all bits of the exponent are set.

    All numbers are checked at once, as digits of one integer. Adding the exponent's last bit to
    each exponent carries into the bit of the sign, which was cleared, where all its bits are set.
    """
    bits = 8 * dtype.itemsize
    lowest = 1 << dtype.lowest_exponent_bit
    exponent = (1 << (bits - 1)) - lowest
    count = len(data) // dtype.itemsize
    exponents = int.from_bytes(data, "little") & _repeated(exponent, dtype, count)
    carried = exponents + _repeated(lowest, dtype, count)
    return not carried & _repeated(1 << (bits - 1), dtype, count)


@lru_cache(maxsize=16)
def _repeated(number: int, dtype: EmbedsDtype, count: int) -> int:
    return int.from_bytes(number.to_bytes(dtype.itemsize, "little") * count, "little")
