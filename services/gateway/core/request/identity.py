"""The identity of a request: two gateways generate the same answer to requests that have the same
content and the same identity.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The id of a request, its seed, and its arrival time."""

    request_id: str
    seed: int
    arrival_unix_nanos: int

    @property
    def created(self) -> int:
        """Arrival time in whole seconds since 1970, which answers contain as `created`."""
        return self.arrival_unix_nanos // 10**9
