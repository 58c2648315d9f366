"""What was measured of one request."""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no whole answer. `kind` is what failures are counted by: `connect`,
    `timeout`, `http 429`, `broken` (the connection ended first), `stream` (an error within the
    stream), `malformed`, `no output`, `interrupted`.
    """

    kind: str
    message: str = ""


INTERRUPTED = Failure("interrupted", "the run was ended before the answer")


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are in seconds after the start of the load.

    `intended` is when the load wanted it sent: its arrival in an open loop, the end of the answer
    before and the time to think in a conversation. Latencies count from there, so that a server or
    a generator that falls behind cannot hide it (G. Tene's coordinated omission).
    """

    number: int
    session: int
    turn: int
    is_warmup: bool
    intended: float
    output_len: int
    """Tokens that were asked for."""
    sent: float | None = None
    """When its first byte was written."""
    token_times: "array[float]" = field(default_factory=lambda: array("d"))
    """When each event that carries output came."""
    ended: float | None = None
    """When the last event of the answer came, or the whole answer that is not streamed."""
    num_input_tokens: int | None = None
    """From `usage`, as are the next two."""
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the whole answer came."""
        return self.failure is None and self.ended is not None

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer: by `usage`, or where the server has none one for each event."""
        if self.num_output_tokens is not None:
            return self.num_output_tokens
        return len(self.token_times)

    @property
    def schedule_lag(self) -> float | None:
        """The time by which it was sent later than intended."""
        return None if self.sent is None else self.sent - self.intended

    @property
    def ttft(self) -> float | None:
        """Time to the first event that carries output."""
        return self.token_times[0] - self.intended if self.token_times else None

    @property
    def e2el(self) -> float | None:
        """Time to the end of the answer."""
        return None if self.ended is None else self.ended - self.intended

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None of fewer than two tokens."""
        if not self.token_times or self.ended is None or self.output_tokens < 2:
            return None
        return (self.ended - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Between each event that carries output and the one before it."""
        return [after - before for before, after in pairwise(self.token_times)]
