"""The identity of a request, which another gateway needs to generate the same answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The name of a request, the seed that was drawn for it, and when it arrived."""

    request_id: str
    seed: int
    arrival_unix_nanos: int

    @property
    def created(self) -> int:
        """When it arrived, in seconds since 1970, as answers say it."""
        return self.arrival_unix_nanos // 10**9
