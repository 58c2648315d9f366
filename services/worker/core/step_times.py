"""Predicts the time of a step from its tokens and their contexts, for simulated devices. A token's
context consists of all tokens that it attends to, including itself.

As in other serving simulators, the time grows linearly with requests and contexts. It may grow with
tokens along a curve, because kernels compute tokens in tiles, and use more threads for many tokens.
The coefficients are in profiles of the simulated device. `stepwell profile` fits them.
"""

from bisect import bisect_left
from dataclasses import dataclass

from services.worker.backends.arrays import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The coefficients of a step's time."""

    seconds: float = 0.0
    """Time that every step with tokens takes."""
    seconds_per_token: float = 0.0
    seconds_per_new_context: float = 0.0
    """Time for each pair of a token and a token of its context, if a request has several tokens."""
    seconds_per_decoded_context: float = 0.0
    """For requests with one token in a step: time for each token of its context."""
    seconds_per_request: float = 0.0
    seconds_by_tokens: tuple[tuple[int, float], ...] = ()
    """Points of a curve: pairs of a number of tokens, in increasing order, and the time of a step.
    The curve is linear between two points, and constant before the first point. Behind the last
    point it continues the line through the last two points.
    """

    def without_contexts(self, num_tokens: int, num_requests: int) -> float:
        """The time of a step without the part that its contexts cause."""
        linear = self.seconds_per_token * num_tokens + self.seconds_per_request * num_requests
        return self.seconds + linear + curve_value(self.seconds_by_tokens, num_tokens)


def curve_value(points: tuple[tuple[int, float], ...], place: int) -> float:
    """The value of a curve at a number of tokens or requests. See StepCosts.seconds_by_tokens."""
    if len(points) < 2:
        return points[0][1] if points else 0.0
    after = min(max(bisect_left(points, (place,)), 1), len(points) - 1)
    (begin, first), (end, last) = points[after - 1], points[after]
    return max(0.0, first + (last - first) * max(place - begin, 0) / (end - begin))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCosts:
    """The time that gateway, scheduler, pool and clients add to a step if they run on the worker's
    processors. A simulation that does not run them adds it.
    """

    seconds_by_requests: tuple[tuple[int, float], ...] = ()
    """A curve like StepCosts.seconds_by_tokens: pairs of the number of requests in a step, and the
    time that such a step becomes longer.
    """
    seconds_per_new_request: float = 0.0
    """Time for each request that a step admits for the first time."""

    def of_step(self, num_requests: int) -> float:
        """The time that is added to a step, without the part for new requests."""
        return curve_value(self.seconds_by_requests, num_requests)


NO_SERVING = ServingCosts()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of steps with one token for each request (`decode`), and of other steps (`mixed`)."""

    decode: StepCosts
    mixed: StepCosts

    def costs(self, num_tokens: int, num_requests: int) -> StepCosts:
        return self.decode if num_tokens == num_requests else self.mixed

    def seconds(self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array) -> float:
        """The time of a step, given its requests' numbers of scheduled and computed tokens."""
        num_requests = len(num_scheduled_tokens)
        if not num_requests:
            return 0.0
        num_tokens = int(num_scheduled_tokens.sum())
        costs = self.costs(num_tokens, num_requests)
        new_context, decoded_context = num_contexts(num_scheduled_tokens, num_computed_tokens)
        return (
            costs.without_contexts(num_tokens, num_requests)
            + costs.seconds_per_new_context * new_context
            + costs.seconds_per_decoded_context * decoded_context
        )


def num_contexts(
    num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array
) -> tuple[int, int]:
    """Returns two sums of context lengths: of all tokens in chunks, and of single tokens."""
    counts = num_scheduled_tokens.astype("int64")
    contexts = counts * num_computed_tokens + counts * (counts + 1) // 2
    single = int(contexts[counts == 1].sum())
    return int(contexts.sum()) - single, single
