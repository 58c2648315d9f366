"""The rate of an open loop over time: constant, in steps, or rising and falling evenly.

`8` is 8 a second for as long as the load lasts; `2:30,8:30` is 2 a second for 30 s, then 8 for
30 s; `2-8:60` rises evenly from 2 to 8 within 60 s. After the last piece the load ends, unless that
piece has no seconds. `inf` sends everything at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Piece:
    """Arrivals a second, at its beginning and its end, and how many seconds it lasts."""

    first: float
    last: float
    seconds: float

    @property
    def num_arrivals(self) -> float:
        """Arrivals to expect in it."""
        if self.seconds == math.inf:
            return math.inf
        return (self.first + self.last) / 2 * self.seconds

    def seconds_until(self, num_arrivals: float) -> float:
        """The time of arrival `num_arrivals`, from the beginning: the inverse of the integral."""
        if self.first == math.inf:
            return 0.0
        if self.first == self.last:
            return num_arrivals / self.first
        slope = (self.last - self.first) / self.seconds
        # slope / 2 t² + first t = num_arrivals, in the form that loses no digits
        root = math.sqrt(max(self.first**2 + 2 * slope * num_arrivals, 0.0))
        return 2 * num_arrivals / (self.first + root)


@dataclass(frozen=True, slots=True)
class RequestRate:
    """Pieces, one after the other."""

    pieces: tuple[Piece, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the notation of this module. Raises ValueError with one sentence."""
        try:
            pieces = tuple(map(_piece, text.split(",")))
        except ValueError:
            raise ValueError(
                f"must be a rate such as 8, steps such as 2:30,8:30, or a ramp such as 2-8:60, "
                f"not {text!r}"
            ) from None
        if any(piece.seconds == math.inf for piece in pieces[:-1]):
            raise ValueError(f"only the last of several rates may have no seconds, not {text!r}")
        return cls(pieces)

    def times(self, unit_arrivals: Iterator[float]) -> Iterator[float]:
        """Maps arrivals of a process with rate 1 to seconds after the start.

        The time change of a renewal process: its n-th arrival comes when the integral of the rate
        reaches that of the process. Ends with the last piece.
        """
        begun = passed = 0.0
        pieces = iter(self.pieces)
        piece = next(pieces)
        for arrival in unit_arrivals:
            while arrival > passed + piece.num_arrivals:
                passed, begun = passed + piece.num_arrivals, begun + piece.seconds
                following = next(pieces, None)
                if following is None:
                    return
                piece = following
            yield begun + piece.seconds_until(arrival - passed)


def _piece(text: str) -> Piece:
    rates, colon, seconds = text.partition(":")
    first, dash, last = rates.partition("-")
    piece = Piece(
        float(first), float(last if dash else first), float(seconds) if colon else math.inf
    )
    is_ramp = piece.first != piece.last
    if not (piece.first > 0 and piece.last > 0 and piece.seconds > 0):
        raise ValueError
    if (is_ramp and math.inf in (piece.first, piece.last, piece.seconds)) or (
        colon and math.inf in (piece.first, piece.seconds)
    ):
        raise ValueError
    return piece
