"""The identity of a request. Another gateway with the same identity generates the same answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The id of a request, its seed, and its arrival time."""

    request_id: str
    seed: int
    arrival_unix_nanos: int

    @property
    def created(self) -> int:
        """Arrival time in whole seconds since 1970. Answers contain this number."""
        return self.arrival_unix_nanos // 10**9
