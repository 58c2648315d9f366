"""How long a tenant's sequences take once they are sent."""

from dataclasses import dataclass

_SHARE_OF_NEWEST, _SHARE_OF_NEWEST_DEVIATION = 1 / 8, 1 / 4
_DEVIATIONS = 2.0


@dataclass(slots=True)
class ServiceTime:
    """The mean of the newest, and how far they are from it, in seconds; smoothed as round-trip
    times are in Jacobson, "Congestion avoidance and control" (SIGCOMM 1988).

    Under overload the queue is as long as deadlines allow: if only the mean were left for running,
    half of what waits longest would run for nothing.
    """

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def longest_usual(self) -> float:
        """Few take longer; 0 while nothing is known."""
        return self.mean + _DEVIATIONS * self.deviation

    def add(self, seconds: float) -> None:
        """One more was served, in so long."""
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 2
            return
        error = seconds - self.mean
        self.mean += _SHARE_OF_NEWEST * error
        self.deviation += _SHARE_OF_NEWEST_DEVIATION * (abs(error) - self.deviation)
