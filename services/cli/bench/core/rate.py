"""The arrival rate of an open loop, and the arrival times. A rate consists of one or more pieces,
each of which is constant or a linear ramp. `8` is 8 arrivals a second for the whole load.
`2:30,8:30` is 2 a second for 30 s, then 8 a second for 30 s. `2-8:60` rises linearly from 2 to 8 a
second within 60 s. The load ends after the last piece. Without a length, the last piece does not
end. `inf` sends all requests at once.
"""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Piece:
    """The arrival rates (per second) at the piece's start and end, and its length in seconds."""

    first: float
    last: float
    seconds: float

    @property
    def num_arrivals(self) -> float:
        if self.seconds == math.inf:
            return math.inf
        return (self.first + self.last) / 2 * self.seconds

    def seconds_until(self, num_arrivals: float) -> float:
        """Seconds from the piece's start until the rate's integral is `num_arrivals`."""
        if self.first == math.inf:
            return 0.0
        if self.first == self.last:
            return num_arrivals / self.first
        slope = (self.last - self.first) / self.seconds
        # Solves slope / 2 t² + first t = num_arrivals by a formula without cancellation.
        root = math.sqrt(max(self.first**2 + 2 * slope * num_arrivals, 0.0))
        return 2 * num_arrivals / (self.first + root)


@dataclass(frozen=True, slots=True)
class RequestRate:
    """An arrival rate over time, which consists of one or more consecutive pieces."""

    pieces: tuple[Piece, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a rate such as `8`, `2:30,8:30` or `2-8:60`. Raises ValueError."""
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

    @property
    def is_infinite(self) -> bool:
        """Whether infinitely many requests arrive at one time."""
        return self.pieces[-1].first == math.inf

    def times(self, unit_arrivals: Iterator[float]) -> Iterator[float]:
        """Converts arrival times at a rate of one a second to arrival times at this rate, both in
        seconds after the start (the time change of a renewal process). Arrival n is at the time
        when the integral of this rate equals the n-th unit arrival. Ends with the last piece.
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


def unit_arrivals(burstiness: float, draw: random.Random) -> Iterator[float]:
    """Yields endless arrival times in seconds, at an average rate of one arrival a second. The gaps
    between arrivals are gamma-distributed (a renewal process).

    `burstiness` is the shape of the gamma distribution, as in `vllm bench serve`. With 1 the gaps
    are exponential, which is a Poisson process. Below 1 arrivals are bursty (the gaps' coefficient
    of variation is 1/√burstiness). Above 1 arrivals are more regular, and with infinity the gaps
    are constant. The first arrival is after the first gap, or at 0 if the gaps are constant.
    """
    if burstiness == math.inf:
        yield from map(float, itertools.count())
    now = 0.0
    while True:
        now += draw.gammavariate(burstiness, 1 / burstiness)
        yield now
