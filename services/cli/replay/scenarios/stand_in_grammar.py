"""What a scenario holds the output of a request to in place of a grammar: a function of a token and
its position, as in the recorded decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

COMPILE_ERROR = "the grammar of the scenario is said not to compile"


@dataclass(frozen=True, slots=True)
class StandInGrammar:
    """A grammar that allows two thirds of all tokens at each position of the output."""

    eos_token_id: int
    ready: int
    """The step before which its compilation is over."""
    length: int | None = None
    """Output tokens after which it allows only the end of the sequence; None: it never ends."""
    error: bool = False
    """Whether it cannot be compiled."""
    break_at: int | None = None
    """A position of the output at which the sampler takes a token that it refuses."""

    def allows(self, token_id: int, position: int) -> bool:
        """Whether the output token at this position, counted from 0, may be `token_id`."""
        if self.length is not None and position >= self.length:
            return token_id == self.eos_token_id
        return token_id != self.eos_token_id and (token_id + position) % 3 != 0

    def sample(self, token_id: int, position: int) -> int:
        """The token that is sampled where the model would like `token_id`: the next higher one that
        is allowed.
        """
        breaks = position == self.break_at
        if not breaks and self.length is not None and position >= self.length:
            return self.eos_token_id
        while self.allows(token_id, position) is breaks:
            token_id += 1
        return token_id

    def num_allowed(self, token_ids: Sequence[int], position: int) -> int:
        """How many of the tokens from this position on are allowed before the first that is not."""
        for index, token_id in enumerate(token_ids):
            if not self.allows(token_id, position + index):
                return index
        return len(token_ids)
