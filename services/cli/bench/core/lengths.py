"""Numbers that are fixed (`128`) or drawn uniformly from a range (`64-256`)."""

import random
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Range:
    """The range from `low` to `high`, both included, in tokens, turns or seconds."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `N` or `A-B`. Raises ValueError with one sentence."""
        low, dash, high = text.partition("-")
        try:
            parsed = cls(float(low), float(high if dash else low))
        except ValueError:
            raise ValueError(f"must be a number or a range such as 64-256, not {text!r}") from None
        if not 0 <= parsed.low <= parsed.high < float("inf"):
            raise ValueError(f"must be a range from a smaller to a larger number, not {text!r}")
        return parsed

    @property
    def is_whole(self) -> bool:
        return self.low == int(self.low) and self.high == int(self.high)

    def number(self, draw: random.Random) -> float:
        return draw.uniform(self.low, self.high)

    def whole(self, draw: random.Random) -> int:
        return draw.randint(int(self.low), int(self.high))

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}-{self.high:g}"
