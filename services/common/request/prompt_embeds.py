"""A prompt that a client sends as token embeddings instead of tokens. Services without tensor
libraries store the numbers as bytes, check their count, and add their digest to the cache salt.
Where token ids are required, the id 0 stands for each embedding.
"""

import enum
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from services.common.errors import InvalidArgument

PLACEHOLDER_TOKEN = 0
_CHECKED_BYTES = 2**18
"""The number of bytes that are checked at once, a multiple of the size of every number type."""


class EmbedsDtype(enum.Enum):
    """The number type, named as in safetensors."""

    FLOAT32 = "F32"
    BFLOAT16 = "BF16"
    FLOAT16 = "F16"

    @property
    def itemsize(self) -> int:
        return 4 if self is EmbedsDtype.FLOAT32 else 2

    @property
    def lowest_exponent_bit(self) -> int:
        """The index of the exponent's lowest bit in a number, counted from the lowest bit."""
        return {EmbedsDtype.FLOAT32: 23, EmbedsDtype.BFLOAT16: 7, EmbedsDtype.FLOAT16: 10}[self]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PromptEmbeds:
    """A matrix [num_tokens, hidden_size] in row-major order, little-endian. Raises InvalidArgument
    without rows, or with empty rows, since a small message must not claim many tokens.
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
        """The placeholder token ids, one for each row."""
        return [PLACEHOLDER_TOKEN] * self.num_tokens

    def rest(self, num_computed_tokens: int) -> "PromptEmbeds | None":
        """The rows after the first `num_computed_tokens`. None if no row is left."""
        if num_computed_tokens >= self.num_tokens:
            return None
        row = len(self.data) // self.num_tokens
        data = self.data[num_computed_tokens * row :]
        return PromptEmbeds(self.num_tokens - num_computed_tokens, self.dtype, data)

    def check(self, hidden_size: int) -> None:
        """Raises InvalidArgument if a row does not have `hidden_size` numbers."""
        given, expected = len(self.data), self.num_tokens * hidden_size * self.dtype.itemsize
        if given != expected:
            raise InvalidArgument(
                f"prompt_embeds has {given} bytes; {self.num_tokens} rows of {hidden_size} numbers "
                f"in {self.dtype.value} are {expected}",
                field="prompt_embeds",
            )

    def check_finite(self) -> None:
        """Raises InvalidArgument if a number is NaN or infinite. Takes milliseconds per MB."""
        chunks = range(0, len(self.data), _CHECKED_BYTES)
        if not all(_is_finite(self.data[at : at + _CHECKED_BYTES], self.dtype) for at in chunks):
            raise InvalidArgument(
                "prompt_embeds holds NaN or infinity; every number must be finite",
                field="prompt_embeds",
            )

    def salted(self, cache_salt: str) -> str:
        """Adds the embeddings' digest to a cache salt, so that only equal prompts share blocks."""
        digest = sha256(self.data).hexdigest()
        return f"{cache_salt}\0prompt_embeds {self.dtype.value} {digest}"


def _is_finite(data: bytes, dtype: EmbedsDtype) -> bool:
    """Whether no number is infinite or NaN. Infinite numbers and NaN have all exponent bits set.
    All numbers are checked at once, as digits of one large integer: the sign and fraction bits are
    cleared, and the lowest exponent bit is added to each exponent. The sum carries into a number's
    sign bit exactly if all exponent bits of the number are set.
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
