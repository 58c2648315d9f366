"""The limit on an output's reasoning tokens (vLLM's `thinking_token_budget`)."""

from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import InvalidArgument

FIELD = "thinking_budget"
MAX_TOKENS = 2**31 - 1
MAX_MARK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """After `num_tokens` reasoning tokens, the tokens `end_token_ids` are forced."""

    num_tokens: int
    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    begins_inside: bool = False

    def validate(self, check_tokens: Callable[[str, tuple[int, ...]], None]) -> None:
        """Raises InvalidArgument for the first invalid field. `check_tokens(name, token_ids)` must
        raise it for ids outside the vocabulary.
        """
        if not 0 <= self.num_tokens <= MAX_TOKENS:
            raise _invalid("num_tokens", f"is {self.num_tokens}, not in [0, {MAX_TOKENS}]")
        for name, mark, least in (
            ("start_token_ids", self.start_token_ids, 0 if self.begins_inside else 1),
            ("end_token_ids", self.end_token_ids, 1),
        ):
            if not least <= len(mark) <= MAX_MARK_TOKENS:
                raise _invalid(name, f"has {len(mark)} tokens, not {least} to {MAX_MARK_TOKENS}")
            check_tokens(f"{FIELD}.{name}", mark)


def _invalid(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}.{field} {problem}", field=f"{FIELD}.{field}")
