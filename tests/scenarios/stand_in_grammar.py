"""A simulated grammar for scenarios (scripted runs of the scheduler). As in the recordings of vLLM,
a token is allowed or not by a function of its id and its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

COMPILE_ERROR = "the grammar of the scenario is said not to compile"


@dataclass(frozen=True, slots=True)
class StandInGrammar:
    """A grammar that allows two thirds of all tokens at each output position."""

    eos_token_id: int
    ready: int
    """The step before which its compilation ends."""
    length: int | None = None
    """The number of output tokens after which only the end-of-sequence token is allowed. With None,
    this token is never allowed.
    """
    error: bool = False
    """Whether its compilation fails."""
    break_at: int | None = None
    """The output position at which the sampler returns a token that is not allowed, or None."""

    def allows(self, token_id: int, position: int) -> bool:
        """Whether `token_id` is allowed at an output position, counted from 0."""
        if self.length is not None and position >= self.length:
            return token_id == self.eos_token_id
        return token_id != self.eos_token_id and (token_id + position) % 3 != 0

    def sample(self, token_id: int, position: int) -> int:
        """The token that is sampled if the model prefers `token_id`: the first allowed token from
        `token_id` upwards or, at the position `break_at`, the first refused token.
        """
        breaks = position == self.break_at
        if not breaks and self.length is not None and position >= self.length:
            return self.eos_token_id
        while self.allows(token_id, position) is breaks:
            token_id += 1
        return token_id

    def num_allowed(self, token_ids: Sequence[int], position: int) -> int:
        """How many leading `token_ids` are allowed, if the first one is at `position`."""
        for index, token_id in enumerate(token_ids):
            if not self.allows(token_id, position + index):
                return index
        return len(token_ids)
