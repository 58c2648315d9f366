"""Checks the changes that a step makes to the batch, and applies them."""

from collections.abc import Set as AbstractSet

import numpy as np

from services.worker.backends.arrays import Int32Array
from services.worker.core.batch.input_batch import InputBatch
from services.worker.core.errors import InvalidStep
from services.worker.core.step import AppendedBlocks, NewRequest, StepInput

PROPOSED_HERE = -1
"""In place of a token id: the worker must propose this draft itself."""

_NO_DRAFTS = np.zeros(1, np.int32)


def apply_step(batch: InputBatch, step: StepInput) -> Int32Array:
    """Applies a step's changes to the batch. If the step is invalid, raises InvalidStep and changes
    nothing.

    Returns the true number of computed tokens of each request. The step's number is too high if
    drafts of the previous step were rejected, because the scheduler sends the step before it learns
    of the rejection.
    """
    num_computed_tokens = _StepCheck(batch, step).run()
    for row in step.removed_rows.tolist():
        del batch.sampling[row]
    for request in step.new_requests:
        batch.enter(request)
    for group, appended in enumerate(step.appended_blocks):
        first = 0
        for row, count in zip(appended.rows, appended.num_blocks, strict=True):
            batch.grow(group, row, appended.block_ids[first : first + count])
            first += count
    return num_computed_tokens


class _StepCheck:
    def __init__(self, batch: InputBatch, step: StepInput) -> None:
        self._batch = batch
        self._limits = batch.limits
        self._step = step
        self._in_use: AbstractSet[int] = batch.sampling.keys()
        """The rows of the batch that are in use after the step's changes."""
        self._new: dict[int, NewRequest] = {}
        self._appended: list[dict[int, int]] = [{} for _ in self._limits.windows]
        """For each KV-cache group, maps rows to the number of blocks that the step appends."""

    def run(self) -> Int32Array:
        """Raises InvalidStep for the first contradiction. Returns what `apply_step` returns."""
        step = self._step
        if len(step.removed_rows) or step.new_requests:
            self._check_rows()
        if step.appended_blocks:
            groups, expected = len(step.appended_blocks), len(self._limits.windows)
            self._require(
                groups == expected,
                "appended_blocks",
                f"has {groups} KV-cache groups, not {expected}",
            )
            for group, appended in enumerate(step.appended_blocks):
                self._check_appended(group, appended)
        self._check_block_ids(step.block_ids_to_zero, "block_ids_to_zero")
        if len(step.copy_sources) or len(step.copy_targets):
            self._check_copies()
        if step.tier_stores is not None or step.tier_loads:
            self._check_tier()
        num_computed_tokens = self._check_scheduled()
        if self._limits.state_block_sizes:
            for group in range(self._limits.first_state_group, self._limits.num_groups):
                self._check_states(group)
        return num_computed_tokens

    def _check_rows(self) -> None:
        in_use = set(self._in_use)
        for row in self._step.removed_rows.tolist():
            self._require(row in in_use, "removed_rows", f"row {row} is not in use")
            in_use.remove(row)
        for request in self._step.new_requests:
            self._check_new(request, in_use)
            in_use.add(request.row)
            self._new[request.row] = request
        self._in_use = in_use

    def _check_tier(self) -> None:
        step, stores = self._step, self._step.tier_stores
        named = [] if stores is None else [("tier_stores", stores)]
        named += [("tier_loads.blocks", load.blocks) for load in step.tier_loads]
        last = self._limits.num_tier_blocks - 1
        for name, blocks in named:
            self._check_block_ids(blocks.block_ids, f"{name}.block_ids")
            count, theirs = len(blocks.block_ids), blocks.tier_block_ids
            parallel = len(theirs) == len(blocks.keys) == count
            self._require(parallel, name, "has lists of different lengths")
            wrong = theirs[(theirs < 0) | (theirs > last)]
            problem = f"block {wrong[:1].tolist()} is not from 0 to {last}"
            self._require(not len(wrong), f"{name}.tier_block_ids", problem)

    def _check_new(self, request: NewRequest, in_use: AbstractSet[int]) -> None:
        num_rows, longest = self._limits.max_num_seqs, self._limits.max_model_len
        row, count, num_prompt = request.row, len(request.token_ids), request.num_prompt_tokens
        name = "new_requests.row"
        self._require(0 <= row < num_rows, name, f"row {row} is not from 0 to {num_rows - 1}")
        self._require(row not in in_use, name, f"row {row} is used by another request")
        name = "new_requests.token_ids"
        self._require(1 <= count <= longest, name, f"has {count} tokens, not 1 to {longest}")
        self._check_token_ids(request.token_ids, name)
        name = "new_requests.num_prompt_tokens"
        self._require(1 <= num_prompt <= count, name, f"is {num_prompt}, not 1 to {count}")
        self._check_tables(request.block_tables)
        request.sampling.validate(self._limits.vocab_size)

    def _check_tables(self, tables: tuple[Int32Array, ...]) -> None:
        name, windows = "new_requests.block_tables", self._limits.windows
        groups, expected = len(tables), len(windows)
        self._require(groups == expected, name, f"has {groups} KV-cache groups, not {expected}")
        most = self._limits.max_blocks_per_seq
        for group, (table, window) in enumerate(zip(tables, windows, strict=True)):
            num_null = 0 if window is None or not len(table) else int(np.argmax(table != 0))
            self._check_entries(group, table[num_null:], name)
            self._require(len(table) <= most, name, f"has {len(table)} blocks, more than {most}")

    def _check_appended(self, group: int, appended: AppendedBlocks) -> None:
        name, rows, counts = "appended_blocks", appended.rows, appended.num_blocks
        self._require(len(rows) == len(counts), name, "has lists of different lengths")
        adds_up = not (counts < 0).any() and int(counts.sum()) == len(appended.block_ids)
        self._require(adds_up, name, "the number of block ids is not the sum of num_blocks")
        self._check_entries(group, appended.block_ids, name)
        grown = self._appended[group]
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self._require(row in self._in_use, name, f"row {row} is not in use")
            grown[row] = grown.get(row, 0) + count
        most = self._limits.max_blocks_per_seq
        for row in grown:
            width = self._table_size(group, row)
            self._require(
                width <= most, name, f"row {row} would have {width} blocks, more than {most}"
            )

    def _check_scheduled(self) -> Int32Array:
        step, most = self._step, self._limits.max_num_batched_tokens
        count = len(step.rows)
        for name in ("num_scheduled_tokens", "num_computed_tokens"):
            given = len(getattr(step, name))
            self._require(given == count, name, f"has {given} entries for {count} rows")
        name, total = "num_scheduled_tokens", sum(step.num_scheduled_tokens.tolist())
        self._require(total <= most, name, f"has {total} tokens, but a step has at most {most}")
        rows = set(step.rows.tolist())
        self._require(len(rows) == count, "rows", "has a row twice")
        if not rows <= self._in_use:
            missing = sorted(rows - self._in_use)
            self._require(not missing, "rows", f"row {missing[:1]} is not in use")
        if len(step.last_token_ids):
            name, given = "last_token_ids", len(step.last_token_ids)
            self._require(given == count, name, f"has {given} entries for {count} rows")
            self._check_token_ids(step.last_token_ids, name)
        if len(step.num_draft_tokens) or len(step.draft_token_ids):
            self._check_drafts()
        return self._check_requests()

    def _check_drafts(self) -> None:
        counts, rows = self._step.num_draft_tokens.tolist(), len(self._step.rows)
        entries = len(counts)
        self._require(
            entries in (0, rows), "num_draft_tokens", f"has {entries} entries for {rows} rows"
        )
        name, token_ids = "draft_token_ids", self._step.draft_token_ids
        adds_up = min(counts, default=0) >= 0 and sum(counts) == len(token_ids)
        self._require(adds_up, name, "the number of drafts is not the sum of num_draft_tokens")
        if self._limits.num_speculative_tokens:
            if token_ids.tolist().count(PROPOSED_HERE) == len(token_ids):
                return
            token_ids = token_ids[token_ids != PROPOSED_HERE]
        self._check_token_ids(token_ids, name)

    def _check_requests(self) -> Int32Array:
        """Checks all requests at once. If the check fails, finds the first invalid request.

        Returns the numbers of computed tokens, without the previous step's drafts that were
        rejected. A step's number may be any int32, so it is compared with bounds, because a sum
        could overflow.
        """
        step, most_rejected = self._step, self._limits.num_speculative_tokens
        scheduled, computed = step.num_scheduled_tokens, step.num_computed_tokens
        drafts = step.num_draft_tokens if len(step.num_draft_tokens) else _NO_DRAFTS
        known, room = self._known_and_room()
        most = known + drafts - scheduled
        num_unknown = computed - most
        starts: Int32Array = np.minimum(computed, most)
        fits = (scheduled > drafts) & (num_unknown <= most_rejected)
        fits &= (starts >= 0) & (starts <= room - scheduled)
        if drafts is not _NO_DRAFTS:
            fits &= (drafts == 0) | (num_unknown >= 0)
        if np.count_nonzero(fits) < len(fits):
            index, drafts = int(fits.argmin()), np.broadcast_to(drafts, fits.shape)
            starts = starts if 0 < num_unknown[index] <= most_rejected else computed
            columns = (step.rows, scheduled, starts, known, room, drafts)
            self._refuse_request(*(int(column[index]) for column in columns))
        return starts

    def _check_copies(self) -> None:
        sources, targets = self._step.copy_sources, self._step.copy_targets
        holds = len(sources) == len(targets)
        self._require(
            holds, "copy_targets", f"has {len(targets)} blocks for {len(sources)} copy_sources"
        )
        allowed = not len(sources) or bool(self._limits.state_block_sizes)
        self._require(
            allowed, "copy_sources", "must be empty, because the model has no recurrent layers"
        )
        self._check_block_ids(sources, "copy_sources")
        self._check_block_ids(targets, "copy_targets")

    def _check_states(self, group: int) -> None:
        """Checks that each request has a block for the recurrent state after the step, and, if it
        has computed tokens, a block with the state before the step. Raises InvalidStep for drafts,
        because a state cannot be rolled back.
        """
        step, size = self._step, self._limits.block_sizes[group]
        self._require(
            not len(step.draft_token_ids),
            "num_draft_tokens",
            "must be empty, because recurrent layers cannot verify drafts",
        )
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        for row, computed, end in zip(
            step.rows.tolist(), step.num_computed_tokens.tolist(), ends.tolist(), strict=True
        ):
            for num_tokens in (computed, end) if computed else (end,):
                index = (num_tokens - 1) // size
                holds = self._entry(group, row, index) != 0
                problem = f"row {row} has no block for the state after {num_tokens} tokens"
                self._require(holds, "block_tables", problem)

    def _entry(self, group: int, row: int, index: int) -> int:
        held = self._batch.block_tables[group, row, : self._batch.num_blocks[group, row]]
        if row in self._new:
            held = self._new[row].block_tables[group]
        if index < len(held):
            return int(held[index])
        if not self._step.appended_blocks:
            return 0
        grown = self._step.appended_blocks[group]
        ends = grown.num_blocks.cumsum()
        for at in np.flatnonzero(grown.rows == row):
            if index - len(held) < grown.num_blocks[at]:
                return int(grown.block_ids[ends[at] - grown.num_blocks[at] + index - len(held)])
            index -= int(grown.num_blocks[at])
        return 0

    def _known_and_room(self) -> tuple[Int32Array, Int32Array]:
        """Returns how many tokens of each request are known, and how many fit in its blocks."""
        rows = self._step.rows.astype(np.int64)
        known, room = self._batch.num_tokens[rows], self._batch.room[rows]
        for row, request in self._new.items():
            known[rows == row] = len(request.token_ids)
            room[rows == row] = self._room_of(row)
        for grown in self._appended:
            for row in grown:
                room[rows == row] = self._room_of(row)
        return known, room

    def _room_of(self, row: int) -> int:
        sizes = (self._table_size(group, row) for group in range(len(self._appended)))
        return self._limits.room(sizes)

    def _refuse_request(
        self, row: int, scheduled: int, computed: int, known: int, room: int, drafts: int
    ) -> None:
        name, longest = "num_scheduled_tokens", self._limits.max_model_len
        end = computed + scheduled
        follows = end - drafts
        self._require(scheduled > drafts, name, f"row {row} has only drafts to compute")
        problem = f"row {row} has {known} tokens, but its step begins after {follows}"
        self._require(computed >= 0 and follows <= known, "num_computed_tokens", problem)
        problem = f"drafts of row {row} do not follow its {known} tokens"
        self._require(not drafts or follows == known, "num_draft_tokens", problem)
        self._require(
            end <= longest,
            name,
            f"row {row} would have {end} tokens, more than max_model_len {longest}",
        )
        self._require(
            end <= room,
            "rows",
            f"row {row} would have {end} tokens, but its blocks have slots for {room}",
        )

    def _table_size(self, group: int, row: int) -> int:
        if row in self._new:
            held = len(self._new[row].block_tables[group])
        else:
            held = int(self._batch.num_blocks[group, row])
        return held + self._appended[group].get(row, 0)

    def _check_token_ids(self, token_ids: Int32Array, field: str) -> None:
        size = self._limits.vocab_size
        wrong = token_ids[(token_ids < 0) | (token_ids >= size)]
        self._require(
            not len(wrong), field, f"token {wrong[:1].tolist()} is not from 0 to {size - 1}"
        )

    def _check_entries(self, group: int, block_ids: Int32Array, field: str) -> None:
        """Checks entries of a block table. Groups of recurrent layers may have the null block."""
        holds_states = group >= self._limits.first_state_group
        self._check_block_ids(block_ids[block_ids != 0] if holds_states else block_ids, field)

    def _check_block_ids(self, block_ids: Int32Array, field: str) -> None:
        if not len(block_ids):
            return
        last = self._limits.num_blocks - 1
        wrong = block_ids[(block_ids < 1) | (block_ids > last)]
        self._require(not len(wrong), field, f"block {wrong[:1].tolist()} is not from 1 to {last}")

    def _require(self, holds: bool, field: str, problem: str) -> None:
        if not holds:
            raise InvalidStep.in_field(self._step.step, field, problem)
