"""When requests arrive in an open loop: a renewal process whose gaps are gamma-distributed.

`burstiness` is the gamma distribution's shape, as in `vllm bench serve`: 1 makes the gaps
exponential, which is a Poisson process; below 1 arrivals come in bursts (the gaps' coefficient of
variation is 1/√burstiness); above 1 they are more even, and with infinity constant.
"""

import math
import random
from collections.abc import Iterator


def unit_arrivals(burstiness: float, draw: random.Random) -> Iterator[float]:
    """Times of arrivals of a process with one arrival a second on average, without end.

    The first gap lies before the first arrival; of constant gaps the first arrival is at 0.
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
