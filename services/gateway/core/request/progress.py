from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The output of a sequence so far: its tokens, the number of its rows of prompt
    log-probabilities, and whether it has ended.
    """

    token_ids: list[int]
    num_prompt_rows: int = 0
    has_ended: bool = False
