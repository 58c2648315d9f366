"""The running times of a tenant's sequences, from being sent to their ends."""

from dataclasses import dataclass

_SHARE_OF_NEWEST, _SHARE_OF_NEWEST_DEVIATION = 1 / 8, 1 / 4
_DEVIATIONS = 2.0


@dataclass(slots=True)
class ServiceTime:
    """The moving mean of running times and of their deviation, in seconds. Both are computed like
    round-trip times in Jacobson, "Congestion avoidance and control" (SIGCOMM 1988).

    Under overload, a request may wait until the time left before its deadline is just enough to
    run. If the mean running time counted as enough, half of such requests would miss their
    deadlines. Therefore `longest_usual` adds two deviations to the mean.
    """

    mean: float = 0.0
    deviation: float = 0.0

    @property
    def longest_usual(self) -> float:
        """A running time in seconds that few sequences exceed. It is the mean plus two deviations.
        0 means that it is not known.
        """
        return self.mean + _DEVIATIONS * self.deviation

    def add(self, seconds: float) -> None:
        if not self.mean:
            self.mean, self.deviation = seconds, seconds / 2
            return
        error = seconds - self.mean
        self.mean += _SHARE_OF_NEWEST * error
        self.deviation += _SHARE_OF_NEWEST_DEVIATION * (abs(error) - self.deviation)
