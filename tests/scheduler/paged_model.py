"""A stand-in for the workers: a deterministic model over a paged cache that is really written.

What it stores for a position is the whole sequence up to it. Before it samples it reads through the
block tables every position that its layers see, and complains when one does not hold what this very
sequence stored there: a block that was shared wrongly, published early, given back too soon or not
computed again is found at the first token that depends on it. With speculation it guesses ahead,
and what it stored for wrong guesses stays there until it is overwritten.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.common.kv_cache_groups import KVCacheGroup
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from tests.scheduler.paged_cache import PagedCache, Tables

VOCAB_SIZE = 1000

_EMPTY = 0


def next_token(token_ids: Sequence[int]) -> int:
    """What the model says after these tokens."""
    return (sum(token_ids[-4:]) * 31 + len(token_ids) * 7) % (VOCAB_SIZE - 3) + 3


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model generates after a prompt if nothing ends it."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def proposals(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Drafts for what comes after these tokens: about seven in ten right, the others one off."""
    return [
        token_id if (len(token_ids) * 7 + index * 13) % 10 < 7 else token_id + 1
        for index, token_id in enumerate(continuation(token_ids, num_tokens))
    ]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that enters the batch."""

    row_index: int
    token_ids: Sequence[int]
    tables: Tables
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request has a step compute; drafts are the last of the scheduled tokens."""

    row_index: int
    num_scheduled: int
    num_computed: int
    drafts: Sequence[int] = ()


class _Row:
    """A request in the batch, with what each of its positions stores: a digest of the salt and of
    all tokens up to it.
    """

    def __init__(self, new: NewRow) -> None:
        self.tables = [list(table) for table in new.tables]
        self.token_ids: list[int] = []
        self.digests: list[int] = []
        self._root = hash((_EMPTY, new.salt))
        self.append(new.token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Further tokens."""
        self.token_ids += token_ids
        self.digests += self.digests_of(token_ids)

    def digests_of(self, further: Iterable[int]) -> list[int]:
        """What further tokens would store."""
        digest, digests = self.digests[-1] if self.digests else self._root, []
        for token_id in further:
            digest = hash((digest, token_id))
            digests.append(digest)
        return digests


@dataclass(frozen=True, slots=True)
class _Pass:
    """The tokens that a step runs of one row: from `start` to `end`, drafts beyond those known."""

    row: _Row
    start: int
    end: int
    drafts: Sequence[int]
    digests: Sequence[int]


class PagedModel:
    """The persistent batch of a worker, and its cache."""

    def __init__(
        self,
        block_size: int,
        num_rows: int,
        num_speculative_tokens: int = 0,
        groups: Sequence[KVCacheGroup] = (),
    ) -> None:
        self._num_rows = num_rows
        self._num_speculative_tokens = num_speculative_tokens
        self._rows: dict[int, _Row] = {}
        self._cache = PagedCache(block_size, groups)

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return len(self._rows)

    def next_position(self, row_index: int, num_computed: int) -> int:
        """Where a row is written next.

        A step planned while the one before it runs counts the drafts of that one as right. The row
        knows which were, and goes on behind those.
        """
        if not self._num_speculative_tokens:
            return num_computed
        return min(num_computed, len(self._rows[row_index].token_ids) - 1)

    def run_plan(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs a step of the scheduler core."""
        entering = [
            NewRow(_row_of(request), request.token_ids, tables, request.cache_salt)
            for request, tables in plan.block_tables.items()
        ]
        appended = {_row_of(request): tables for request, tables in plan.appended_blocks.items()}
        work = [
            Work(_row_of(request), scheduled, computed, plan.draft_token_ids.get(request, ()))
            for request, scheduled, computed in zip(
                plan.requests, plan.num_scheduled_tokens, plan.num_computed_tokens, strict=True
            )
        ]
        token_ids = self.run(plan.removed_rows, entering, appended, work, plan.block_ids_to_zero)
        if not self._num_speculative_tokens:
            return ModelRunnerOutput(token_ids)
        return ModelRunnerOutput(
            token_ids,
            draft_token_ids=[
                proposals(self._rows[item.row_index].token_ids, self._num_speculative_tokens)
                if sampled
                else []
                for item, sampled in zip(work, token_ids, strict=True)
            ],
        )

    def run(
        self,
        removed: Iterable[int],
        entering: Iterable[NewRow],
        appended: Mapping[int, Tables],
        work: Sequence[Work],
        zeroed: Iterable[int] = (),
    ) -> list[list[int]]:
        """Runs a step; returns the sampled tokens of each request: none inside a prompt, and with
        drafts those that were right and one more.
        """
        for row_index in removed:
            assert self._rows.pop(row_index, None) is not None, f"row {row_index} was empty"
        entered = set()
        for new in entering:
            assert 0 <= new.row_index < self._num_rows
            assert new.row_index not in self._rows, f"row {new.row_index} was taken"
            self._rows[new.row_index] = _Row(new)
            entered.add(new.row_index)
        for row_index, grown in appended.items():
            for table, blocks in zip(self._rows[row_index].tables, grown, strict=True):
                table.extend(blocks)
        self._cache.zero(zeroed)
        passes = [self._begin(item, item.row_index in entered) for item in work]
        for running in passes:
            self._write(running)
        return [self._sample(running) for running in passes]

    def _begin(self, work: Work, has_just_entered: bool) -> _Pass:
        """Drafts of -1 stand for those that the model made itself, of one that has just entered for
        nothing at all: they pad the step.
        """
        row, drafts = self._rows[work.row_index], work.drafts
        if -1 in drafts and not has_just_entered:
            drafts = proposals(row.token_ids, len(drafts))
        start = self.next_position(work.row_index, work.num_computed)
        digests = [*row.digests, *row.digests_of(drafts)] if drafts else row.digests
        return _Pass(row, start, start + work.num_scheduled, drafts, digests)

    def _write(self, running: _Pass) -> None:
        row, start, end = running.row, running.start, running.end
        assert start < end <= len(running.digests), f"{start}..{end} of {len(running.digests)}"
        self._cache.write(row.tables, running.digests, start, end)

    def _sample(self, running: _Pass) -> list[int]:
        row, end = running.row, running.end
        self._cache.read(row.tables, running.digests, running.start, end)
        if end < len(row.token_ids):
            return []
        sampled = continuation(row.token_ids, 1)
        for draft in running.drafts:
            if draft != sampled[-1]:
                break
            sampled += continuation([*row.token_ids, *sampled], 1)
        row.append(sampled)
        return sampled


def _row_of(request: Request) -> int:
    assert request.row is not None, f"{request.request_id} is planned without a row"
    return request.row
