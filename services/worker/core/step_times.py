"""The time of a step as a linear function of its tokens and their contexts.

The function is the one of several simulators of serving. Profiles of the simulated device have its
coefficients, and `stepwell profile` fits them.
"""

from dataclasses import astuple, dataclass, replace

import numpy as np

from services.worker.core.step import Int32Array
from services.worker.sampling.arrays import Float64Array

TILE_TOKENS = 16
"""Tokens that matrix products compute together, such as the rows of a tile of Intel's AMX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The coefficients of a step's time. A token's context is the tokens that it attends to,
    including itself.
    """

    seconds: float
    """Time of any step with tokens."""
    seconds_per_token: float = 0.0
    seconds_per_new_context: float = 0.0
    """Time for each pair of a token and a token of its context, in chunks of several tokens."""
    seconds_per_decoded_context: float = 0.0
    """Time for each token of the contexts of single tokens."""
    seconds_per_request: float = 0.0
    seconds_per_tile: float = 0.0
    """Time for each TILE_TOKENS tokens. The last tile may have fewer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCosts:
    """The time that gateway, scheduler, pool and clients add to a step if they share the
    processors with the worker. Simulations without these services add it.
    """

    seconds: float = 0.0
    """Time for each step."""
    seconds_per_token: float = 0.0
    """Time for each request in a step, most of which get a token."""
    seconds_per_new_request: float = 0.0
    """Time for each request that a step admits for the first time."""


NO_SERVING = ServingCosts()


def step_features(
    num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array
) -> Float64Array:
    """The numbers that the fields of StepCosts are multiplied by, [6], given the numbers of
    scheduled and computed tokens of a step's requests.
    """
    counts = num_scheduled_tokens.astype(np.int64)
    contexts = counts * num_computed_tokens + counts * (counts + 1) // 2
    single = int(contexts[counts == 1].sum())
    chunks = int(contexts.sum()) - single
    num_tokens = int(counts.sum())
    tiles = -(-num_tokens // TILE_TOKENS)
    return np.array([1, num_tokens, chunks, single, len(counts), tiles], np.float64)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The times of steps with only single tokens (`decode`), and of all other steps (`mixed`)."""

    decode: StepCosts
    mixed: StepCosts
    small: StepCosts | None = None
    """The costs of steps of at most `small_tokens` tokens, for which kernels of small models use a
    single thread.
    """
    small_tokens: int = 0

    def costs(self, num_tokens: int, num_requests: int) -> StepCosts:
        """The costs of a step."""
        if self.small is not None and num_tokens <= self.small_tokens:
            return self.small
        return self.decode if num_tokens == num_requests else self.mixed

    def served(self, serving: ServingCosts) -> "StepTimes":
        """These times and the serving costs of each step, except of new requests."""

        def more(costs: StepCosts) -> StepCosts:
            return replace(
                costs,
                seconds=costs.seconds + serving.seconds,
                seconds_per_request=costs.seconds_per_request + serving.seconds_per_token,
            )

        small = None if self.small is None else more(self.small)
        return replace(self, decode=more(self.decode), mixed=more(self.mixed), small=small)

    def seconds(self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array) -> float:
        """The time of a step, see step_features. It is 0 for a step without requests."""
        if not len(num_scheduled_tokens):
            return 0.0
        costs = self.costs(int(num_scheduled_tokens.sum()), len(num_scheduled_tokens))
        features = step_features(num_scheduled_tokens, num_computed_tokens)
        return float(features @ np.array(astuple(costs)))
