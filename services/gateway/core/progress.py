"""From where an engine goes on with a sequence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """What came of a sequence before: its tokens, how many rows of log-probabilities of its prompt,
    and whether it has ended.
    """

    token_ids: list[int]
    num_prompt_rows: int = 0
    has_ended: bool = False
