"""A stand-in for the workers: a deterministic model over a paged cache that is really written.

What it stores for a position is the whole sequence up to it. Before it samples it reads every
position through the block table, and complains when one does not hold what this very sequence
stored there: a block that was shared wrongly, published early, or not computed again is found at
the first token that depends on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.request import Request

VOCAB_SIZE = 1000

_EMPTY = 0


def next_token(token_ids: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return (sum(token_ids[-4:]) * 31 + len(token_ids) * 7) % (VOCAB_SIZE - 3) + 3


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model says after a prompt, when nobody stops it."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass(slots=True)
class _Row:
    """A request in the batch."""

    token_ids: list[int]
    table: list[int]
    salt: str

    def digests(self) -> list[int]:
        """What each position stores: a digest of the salt and of all tokens up to it."""
        digest, digests = hash((_EMPTY, self.salt)), []
        for token_id in self.token_ids:
            digest = hash((digest, token_id))
            digests.append(digest)
        return digests


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that enters the batch."""

    slot: int
    token_ids: Sequence[int]
    table: Sequence[int]
    salt: str = ""


class PagedModel:
    """The persistent batch of a worker, and its cache."""

    def __init__(self, block_size: int, num_slots: int) -> None:
        self._block_size = block_size
        self._num_slots = num_slots
        self._rows: dict[int, _Row] = {}
        self._cache: dict[tuple[int, int], int] = {}

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return len(self._rows)

    def run_plan(self, plan: StepPlan) -> StepOutput:
        """Runs a step of the scheduler core."""
        entering = [
            NewRow(_slot(request), request.token_ids, tables[0], request.cache_salt)
            for request, tables in plan.block_tables.items()
        ]
        appended = {_slot(request): tables[0] for request, tables in plan.appended_blocks.items()}
        rows = zip(plan.requests, plan.num_scheduled_tokens, plan.num_computed_tokens, strict=True)
        work = [(_slot(request), scheduled, computed) for request, scheduled, computed in rows]
        return StepOutput(self.run(plan.removed_slots, entering, appended, work))

    def run(
        self,
        removed: Iterable[int],
        entering: Iterable[NewRow],
        appended: Mapping[int, Sequence[int]],
        work: Sequence[tuple[int, int, int]],
    ) -> list[list[int]]:
        """Runs a step; `work` is (slot, tokens to compute, tokens computed) of each request."""
        for slot in removed:
            assert self._rows.pop(slot, None) is not None, f"slot {slot} was empty"
        for row in entering:
            assert 0 <= row.slot < self._num_slots
            assert row.slot not in self._rows, f"slot {row.slot} was taken"
            self._rows[row.slot] = _Row(list(row.token_ids), list(row.table), row.salt)
        for slot, blocks in appended.items():
            self._rows[slot].table += blocks
        for slot, scheduled, computed in work:
            self._write(self._rows[slot], computed, computed + scheduled)
        return [self._sample(self._rows[slot], sum(counts)) for slot, *counts in work]

    def _write(self, row: _Row, start: int, end: int) -> None:
        assert start < end <= len(row.token_ids), f"{start}..{end} of {len(row.token_ids)}"
        assert end <= len(row.table) * self._block_size, "tokens without a place in the cache"
        digests = row.digests()
        for position in range(start, end):
            assert self._place(row, position)[0] != 0, "the null block is not to be written"
            self._cache[self._place(row, position)] = digests[position]

    def _sample(self, row: _Row, end: int) -> list[int]:
        for position, digest in enumerate(row.digests()[:end]):
            stored = self._cache.get(self._place(row, position))
            assert stored == digest, f"position {position} holds another sequence"
        if end < len(row.token_ids):
            return []
        row.token_ids.append(next_token(row.token_ids))
        return row.token_ids[-1:]

    def _place(self, row: _Row, position: int) -> tuple[int, int]:
        return row.table[position // self._block_size], position % self._block_size


def _slot(request: Request) -> int:
    assert request.slot is not None, f"{request.request_id} is planned without a slot"
    return request.slot
