"""The measurements of one request."""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request has no complete response. Failures are counted by `kind`. The kinds are
    `connect`, `timeout`, `http 429` and other statuses, `broken` (the connection ended early),
    `stream` (an error event), `malformed`, `no output` and `interrupted`.
    """

    kind: str
    message: str = ""


INTERRUPTED = Failure("interrupted", "the run was ended before the answer")


@dataclass(slots=True)
class RequestRecord:
    """The measurements of one request. Times are in seconds after the start of the load.

    `intended` is the time at which the request should be sent. In an open loop it is the request's
    arrival time. In a conversation it is the end of the previous response plus the think time.
    Latencies start at `intended`, so that delays of the server or the load generator are not hidden
    (G. Tene's coordinated omission).
    """

    number: int
    session: int
    turn: int
    is_warmup: bool
    intended: float
    output_len: int
    sent: float | None = None
    """The time at which the request was written to the connection. None if it was not sent."""
    token_times: "array[float]" = field(default_factory=lambda: array("d"))
    """The arrival time of each event with output."""
    ended: float | None = None
    """The arrival time of the response's last event, or of the end of an unstreamed response. None
    if the response has not ended.
    """
    num_input_tokens: int | None = None
    """Number of prompt tokens. All `num_*_tokens` are the server's `usage`, or None if missing."""
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the complete response arrived."""
        return self.failure is None and self.ended is not None

    @property
    def output_tokens(self) -> int:
        """Number of output tokens. Without `usage`, the number of events with output."""
        if self.num_output_tokens is not None:
            return self.num_output_tokens
        return len(self.token_times)

    @property
    def schedule_lag(self) -> float | None:
        """Seconds from `intended` to `sent`. None if the request was not sent."""
        return None if self.sent is None else self.sent - self.intended

    @property
    def ttft(self) -> float | None:
        """Seconds from `intended` to the first event with output. None without such an event."""
        return self.token_times[0] - self.intended if self.token_times else None

    @property
    def e2el(self) -> float | None:
        """Seconds from `intended` to the end of the response. None if it has not ended."""
        return None if self.ended is None else self.ended - self.intended

    @property
    def tpot(self) -> float | None:
        """Seconds for each output token after the first token. None with fewer than two tokens."""
        if not self.token_times or self.ended is None or self.output_tokens < 2:
            return None
        return (self.ended - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive events with output."""
        return [after - before for before, after in pairwise(self.token_times)]
