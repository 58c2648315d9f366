"""Special tokens of a model: marks of the output format, and separators of a prompt's messages."""

from collections.abc import Sequence

from services.gateway.core.ports import Tokenizer


class SpecialTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marks: dict[tuple[str, ...], frozenset[int]] = {}

    def marks(self, marks: tuple[str, ...]) -> frozenset[int]:
        """Returns the special tokens whose text is one of these marks or a part of a mark."""
        found = self._marks.get(marks)
        if found is None:
            tokenizer = self._tokenizer
            names = ((token, tokenizer.token_bytes(token).decode()) for token in self._all)
            found = frozenset(
                token for token, name in names if name and any(name in mark for mark in marks)
            )
            self._marks[marks] = found
        return found

    def open_turn(self, prompt: str, token_ids: Sequence[int], marks: tuple[str, ...]) -> str:
        """Returns the text of a prompt's last message: everything after the last special token that
        is not one of these marks. If the prompt has only marks as special tokens, returns it whole.
        """
        boundaries = self._all - self.marks(marks)
        for at in range(len(token_ids) - 1, -1, -1):
            if token_ids[at] in boundaries:
                return self._tokenizer.decode(token_ids[at + 1 :], skip_special_tokens=False)
        return prompt

    @property
    def _all(self) -> frozenset[int]:
        return self._tokenizer.special_ids
