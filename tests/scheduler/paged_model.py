"""A simulation of the workers: a deterministic model over a paged KV cache that stores contents.

The value that the cache stores for a position is a digest of the sequence up to it. Before
sampling, the model reads through the block tables every position that its layers see, and fails if
a position has another value than this sequence's. So a block that was wrongly shared, published too
early, freed too early or not recomputed is detected at the first token that depends on it. With
speculation the model proposes drafts. Values of rejected drafts remain stored until they are
overwritten.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.common.pool.kv_cache_groups import KVCacheGroup
from services.common.pool.operations import BlockCopy
from services.common.request.encoder_input import EncoderInput
from services.scheduler.core.output import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.request import Request
from tests.scenarios.stand_in_grammar import StandInGrammar
from tests.scheduler.paged_cache import EMPTY, PagedCache, Tables

VOCAB_SIZE = 1000


def next_token(token_ids: Sequence[int]) -> int:
    """The model's next token after these tokens."""
    return (sum(token_ids[-4:]) * 31 + len(token_ids) * 7) % (VOCAB_SIZE - 3) + 3


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def is_right(num_tokens: int, index: int) -> bool:
    """Whether draft `index` after `num_tokens` tokens is right. About seven in ten drafts are. The
    others are off by one.
    """
    return (num_tokens * 7 + index * 13) % 10 < 7


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that enters the persistent batch. `root` is its salt and adapter. Its block hashes
    depend on `root`, its tokens, and its multimodal items.
    """

    row_index: int
    token_ids: Sequence[int]
    tables: Tables
    root: Hashable = ""
    items: Sequence[EncoderInput] = ()
    grammar: StandInGrammar | None = None
    num_prompt_tokens: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step for one request. Drafts are the last of the scheduled tokens."""

    row_index: int
    num_scheduled: int
    num_computed: int
    drafts: Sequence[int] = ()


class StoredTokens:
    """A sequence: its tokens, and the value that the cache stores for each position. The value is a
    digest of the root (salt and adapter), of all tokens up to the position, and of their multimodal
    items.
    """

    def __init__(
        self, token_ids: Iterable[int], root: Hashable = "", items: Sequence[EncoderInput] = ()
    ) -> None:
        self.token_ids: list[int] = []
        self.digests: list[int] = []
        self._root = hash((EMPTY, root))
        self._items = {
            item.offset + index: (item.identifier, index)
            for item in items
            for index in range(item.length)
        }
        self.append(token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        further = list(token_ids)
        digests = self.digests_of(further)
        self.token_ids += further
        self.digests += digests

    def digests_of(self, further: Iterable[int]) -> list[int]:
        digest, digests = self.digests[-1] if self.digests else self._root, []
        for position, token_id in enumerate(further, len(self.digests)):
            digest = hash((digest, token_id, self._items.get(position)))
            digests.append(digest)
        return digests


class _Row(StoredTokens):
    def __init__(self, new: NewRow) -> None:
        super().__init__(new.token_ids, new.root, new.items)
        self.tables = [list(table) for table in new.tables]
        self.name = new.name
        self._grammar = new.grammar
        self._num_prompt_tokens = new.num_prompt_tokens

    def take_back(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:], self.digests[num_tokens:]

    def continuation(self, num_tokens: int) -> list[int]:
        """The tokens with which the model continues, restricted by the row's grammar."""
        if self._grammar is None:
            return continuation(self.token_ids, num_tokens)
        longer = list(self.token_ids)
        for _ in range(num_tokens):
            position = len(longer) - self._num_prompt_tokens
            longer.append(self._grammar.sample(next_token(longer), position))
        return longer[len(self.token_ids) :]

    def proposals(self, num_tokens: int) -> list[int]:
        """Drafts for the row. From the first draft that the grammar refuses on, drafts are -1."""
        drafts = [
            token_id if is_right(len(self.token_ids), index) else token_id + 1
            for index, token_id in enumerate(self.continuation(num_tokens))
        ]
        num_allowed = self.num_allowed(drafts)
        return drafts[:num_allowed] + [-1] * (num_tokens - num_allowed)

    def num_allowed_of_last(self, num_tokens: int) -> int:
        """How many of the last `num_tokens` tokens precede the first that the grammar refuses."""
        if self._grammar is None:
            return num_tokens
        begin = len(self.token_ids) - num_tokens
        return self._grammar.num_allowed(self.token_ids[begin:], begin - self._num_prompt_tokens)

    def num_allowed(self, further: Sequence[int]) -> int:
        """How many of the tokens `further` precede the first token that the grammar refuses."""
        if self._grammar is None:
            return len(further)
        return self._grammar.num_allowed(further, len(self.token_ids) - self._num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The positions `start` to `end` of one row, which a step computes. The last may be drafts."""

    row: _Row
    start: int
    end: int
    drafts: Sequence[int]
    digests: Sequence[int]
    is_void: bool


@dataclass(frozen=True, slots=True)
class StepWork:
    """A planned step, as in the message that workers receive."""

    removed_rows: Sequence[int]
    entering: Sequence[NewRow]
    appended: Mapping[int, Tables]
    work: Sequence[Work]
    zeroed: Sequence[int]
    copies: Sequence[BlockCopy]


def work_of(
    plan: SchedulerOutput, grammars: Mapping[str, StandInGrammar] | None = None
) -> StepWork:
    """The message for a plan, with copies of current tokens. `grammars` are keyed by request id."""
    held = grammars or {}
    starts, counts = plan.num_computed_tokens, plan.num_scheduled_tokens
    return StepWork(
        list(plan.removed_rows),
        [
            NewRow(
                _row_of(request),
                list(request.token_ids),
                tuple(map(list, tables)),
                (request.cache_salt, request.adapter_digest),
                request.encoder_inputs,
                held.get(request.request_id),
                request.num_prompt_tokens,
                request.request_id,
            )
            for request, tables in plan.block_tables.items()
        ],
        {
            _row_of(request): tuple(map(list, tables))
            for request, tables in plan.appended_blocks.items()
        },
        [
            Work(_row_of(request), scheduled, computed, plan.draft_token_ids.get(request, ()))
            for request, scheduled, computed in zip(plan.requests, counts, starts, strict=True)
        ],
        list(plan.block_ids_to_zero),
        list(plan.copies),
    )


class PagedModel:
    """A worker's persistent batch and KV cache."""

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
        self._void: tuple[Collection[str], frozenset[int]] = ((), frozenset())
        self.void_names: set[str] = set()
        """Requests that the last step computed from contents that belong to no sequence."""
        self.cache = PagedCache(block_size, groups, follows_states=not num_speculative_tokens)

    @property
    def num_requests(self) -> int:
        return len(self._rows)

    def next_position(self, row_index: int, num_computed: int) -> int:
        """The next position that a row writes. A step that was planned before the previous step
        ended counts all drafts of the previous step as computed. The row
        has only the accepted drafts.
        """
        if not self._num_speculative_tokens:
            return num_computed
        return min(num_computed, len(self._rows[row_index].token_ids) - 1)

    def run_plan(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return self.run_work(work_of(plan))

    def run_work(
        self, step: "StepWork", names: Collection[str] = (), invalid: Collection[int] = ()
    ) -> ModelRunnerOutput:
        """Runs a step. Requests in `names`, and requests with blocks in `invalid`, store values
        that belong to no sequence.
        """
        self.cache.garble(invalid)
        self._void, self.void_names = (names, frozenset(invalid)), set()
        token_ids = self.run(
            step.removed_rows, step.entering, step.appended, step.work, step.zeroed, step.copies
        )
        rows = [self._rows[item.row_index] for item in step.work]
        refused = {
            index: num_allowed
            for index, (row, sampled) in enumerate(zip(rows, token_ids, strict=True))
            if (num_allowed := row.num_allowed_of_last(len(sampled))) < len(sampled)
        }
        drafts: list[list[int]] = []
        if self._num_speculative_tokens:
            drafts = [
                [draft for draft in row.proposals(self._num_speculative_tokens) if draft >= 0]
                if sampled
                else []
                for row, sampled in zip(rows, token_ids, strict=True)
            ]
        return ModelRunnerOutput(token_ids, draft_token_ids=drafts, refused_tokens=refused)

    def names_holding(self, blocks: Collection[int]) -> set[str]:
        holding = frozenset(blocks)
        return {
            row.name
            for row in self._rows.values()
            if any(not holding.isdisjoint(table) for table in row.tables)
        }

    def take_back(self, request: Request) -> None:
        row = None if request.row is None else self._rows.get(request.row)
        if row is not None and row.name == request.request_id:
            row.take_back(request.num_tokens)

    def run(
        self,
        removed: Iterable[int],
        entering: Iterable[NewRow],
        appended: Mapping[int, Tables],
        work: Sequence[Work],
        zeroed: Iterable[int] = (),
        copies: Iterable[BlockCopy] = (),
    ) -> list[list[int]]:
        """Runs a step. Returns the sampled tokens of each request: its accepted drafts and one more
        token, or none if the step ends inside its prompt.
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
        self.cache.zero(zeroed)
        self.cache.copy(copies)
        passes = [self._begin(item, item.row_index in entered) for item in work]
        for running in passes:
            if running.is_void:
                continue
            self.cache.read_states(running.row.tables, running.digests, running.start)
        for running in passes:
            self._write(running)
        return [self._sample(running) for running in passes]

    def _begin(self, work: Work, has_just_entered: bool) -> _Pass:
        """Starts the work of a row. Drafts of -1 stand for the drafts that the model proposed, or
        are padding if the row has just entered.
        """
        row, drafts = self._rows[work.row_index], work.drafts
        if -1 in drafts and not has_just_entered:
            drafts = row.proposals(len(drafts))
        start = self.next_position(work.row_index, work.num_computed)
        digests = [*row.digests, *row.digests_of(drafts)] if drafts else row.digests
        is_void = self._is_void(row)
        if is_void:
            digests = [EMPTY] * len(digests)
        return _Pass(row, start, start + work.num_scheduled, drafts, digests, is_void)

    def _is_void(self, row: _Row) -> bool:
        names, invalid = self._void
        if not (names or invalid):
            return False
        return row.name in names or any(not invalid.isdisjoint(table) for table in row.tables)

    def _write(self, running: _Pass) -> None:
        row, start, end = running.row, running.start, running.end
        assert start < end <= len(running.digests), f"{start}..{end} of {len(running.digests)}"
        self.cache.write(row.tables, running.digests, start, end)

    def _sample(self, running: _Pass) -> list[int]:
        row, end = running.row, running.end
        if not running.is_void and self.cache.is_void(row.tables, running.start, end):
            self.void_names.add(row.name)
            self._write(replace(running, digests=[EMPTY] * len(running.digests)))
        elif not running.is_void:
            self.cache.read(row.tables, running.digests, running.start, end)
        if end < len(row.token_ids):
            return []
        truth = row.continuation(1 + len(running.drafts))
        num_right = 0
        while num_right < len(running.drafts) and running.drafts[num_right] == truth[num_right]:
            num_right += 1
        sampled = truth[: 1 + num_right]
        row.append(sampled)
        return sampled


def _row_of(request: Request) -> int:
    assert request.row is not None, f"{request.request_id} is planned without a row"
    return request.row
