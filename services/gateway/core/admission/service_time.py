"""The running times of a tenant's sequences, from when they are sent to their ends."""

from dataclasses import dataclass

_SHARE_OF_NEWEST, _SHARE_OF_NEWEST_DEVIATION = 1 / 8, 1 / 4
_DEVIATIONS = 2.0


@dataclass(slots=True)
class ServiceTime:
    """The smoothed mean and mean deviation, in seconds, as those of round-trip times in Jacobson,
    "Congestion avoidance and control" (SIGCOMM 1988).

    Under overload requests wait until shortly before their deadlines. If only the mean were kept
    for running, half of those that wait longest would not end in time.
    """

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def longest_usual(self) -> float:
        """A time that few sequences exceed: the mean and two deviations; 0: not known."""
        return self.mean + _DEVIATIONS * self.deviation

    def add(self, seconds: float) -> None:
        """Adds the running time of one sequence."""
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 2
            return
        error = seconds - self.mean
        self.mean += _SHARE_OF_NEWEST * error
        self.deviation += _SHARE_OF_NEWEST_DEVIATION * (abs(error) - self.deviation)
