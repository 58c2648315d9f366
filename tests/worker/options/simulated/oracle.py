"""The simulated model in plain Python: computes the next token from the previous tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

_MASK = 2**64 - 1


@dataclass(frozen=True)
class Oracle:
    """Computes the simulated model's tokens. `windows` has the window of each KV-cache group.
    Tokens in `ends`, which would end a request, are never the next token.
    """

    vocab_size: int
    ends: tuple[int, ...]
    windows: tuple[int | None, ...] = (None,)

    def next_token(self, token_ids: Sequence[int], adapter: int = 0) -> int:
        """The token after `token_ids`. `adapter` is the adapter's number plus 1, or 0 for none."""
        candidates = [token for token in range(self.vocab_size) if token not in self.ends]
        return candidates[self._hash(token_ids, adapter) % len(candidates)]

    def drafts_right(self, token_ids: Sequence[int], acceptance_rate: float) -> bool:
        """Whether a draft model with this acceptance rate proposes the right next token."""
        return _mix(self._hash(token_ids) ^ 0x5851F42D4C957F2D) / 2**64 < acceptance_rate

    def _hash(self, token_ids: Sequence[int], adapter: int = 0) -> int:
        keys = [token + (adapter << 32) for token in token_ids]
        seen = self._seen(keys)
        values = [_mix(total) for total in seen]
        return _mix(seen[-1] ^ _mix(self._seen(values)[-1]))

    def continuation(self, prompt: Sequence[int], count: int, adapter: int = 0) -> list[int]:
        token_ids = list(prompt)
        for _ in range(count):
            token_ids.append(self.next_token(token_ids, adapter))
        return token_ids[len(prompt) :]

    def _seen(self, numbers: Sequence[int]) -> list[int]:
        """For each position, the sum of the numbers in the windows of all KV-cache groups."""
        sums = [0] * len(numbers)
        for group, window in enumerate(self.windows, start=1):
            terms = ((number + (group << 56)) * _factor(i) for i, number in enumerate(numbers))
            before = [0, *accumulate(terms)]
            for position in range(len(numbers)):
                first = 0 if window is None else max(0, position - window + 1)
                sums[position] += before[position + 1] - before[first]
        return [total & _MASK for total in sums]


def _mix(number: int) -> int:
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


@cache
def _factor(index: int) -> int:
    return _mix((index + 1) * 0x9E3779B97F4A7C15 & _MASK) | 1
