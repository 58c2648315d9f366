"""Arrival times of an open loop, which are a renewal process with gamma-distributed gaps.

`burstiness` is the shape of the gamma distribution, as in `vllm bench serve`. With 1 the gaps are
exponential, which is a Poisson process. Below 1 arrivals are bursty (the gaps' coefficient of
variation is 1/√burstiness). Above 1 they are more regular, and with infinity the gaps are constant.
"""

import math
import random
from collections.abc import Iterator


def unit_arrivals(burstiness: float, draw: random.Random) -> Iterator[float]:
    """Yields arrival times in seconds without end, at an average rate of one arrival a second.

    The first arrival is after the first gap. With constant gaps it is at 0.
    """
    if burstiness == math.inf:
        yield from _constant()
    now = 0.0
    while True:
        now += draw.gammavariate(burstiness, 1 / burstiness)
        yield now


def _constant() -> Iterator[float]:
    number = 0
    while True:
        yield float(number)
        number += 1
