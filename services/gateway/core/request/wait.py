"""A sequence's wait at the gateway: its reason and duration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that has ended. Times are on the event loop's clock, in seconds."""

    reason: str
    began: float
    ended: float
    num_ahead: int
    """Number of the tenant's sequences that were already waiting when this sequence arrived."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began
