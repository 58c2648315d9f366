"""The persistent batch, whose rows are the running requests, applies the changes of steps, and
refuses contradictory changes.
"""

from dataclasses import replace

import numpy as np
import pytest

from services.common.errors import InvalidArgument
from services.common.request.sampling import SamplingParams
from services.worker.core.batch.input_batch import BatchLimits, InputBatch
from services.worker.core.batch.step_difference import apply_step
from services.worker.core.errors import InvalidStep
from services.worker.core.step import NewRequest, StepInput
from tests.worker.runner_driver import GREEDY, appended, ints

LIMITS = BatchLimits(
    max_num_seqs=4,
    max_model_len=16,
    max_num_batched_tokens=12,
    vocab_size=100,
    block_size=4,
    num_blocks=20,
)


def new(row: int, tokens: list[int], blocks: list[int]) -> NewRequest:
    return NewRequest(row, ints(*tokens), len(tokens), GREEDY, (ints(*blocks),))


def step(
    *entries: tuple[int, int, int], enter: tuple[NewRequest, ...] = (), **changes: object
) -> StepInput:
    """A step. Entries are (row, number of scheduled tokens, number of computed tokens)."""
    rows, scheduled, computed = zip(*entries, strict=True) if entries else ((), (), ())
    plain = StepInput(1, 7, ints(*rows), ints(*scheduled), ints(*computed), new_requests=enter)
    return replace(plain, **changes)


@pytest.fixture
def batch() -> InputBatch:
    batch = InputBatch(LIMITS)
    apply_step(batch, step((2, 5, 0), enter=(new(2, [10, 11, 12, 13, 14], [3, 4]),)))
    return batch


def test_differences_add_up_to_the_state_of_each_row(batch: InputBatch) -> None:
    for token_id in (50, 51, 52, 53):
        batch.append_one(ints(2), ints(token_id))
    apply_step(
        batch,
        step(
            (2, 4, 5),
            (0, 2, 0),
            enter=(new(0, [20, 21], [9]),),
            appended_blocks=(appended((2, [7, 8])),),
        ),
    )
    assert batch.sampling.keys() == {0, 2}
    assert batch.token_ids[2, :9].tolist() == [10, 11, 12, 13, 14, 50, 51, 52, 53]
    assert batch.block_tables[0, 2, :4].tolist() == [3, 4, 7, 8]
    assert batch.num_blocks.tolist() == [[1, 0, 4, 0]]
    assert batch.num_tokens[2] == 9


def test_a_freed_row_can_be_taken_in_the_same_step(batch: InputBatch) -> None:
    apply_step(batch, step((2, 1, 0), removed_rows=ints(2), enter=(new(2, [99], [5]),)))
    assert batch.num_tokens[2] == 1
    assert batch.block_tables[0, 2, : batch.num_blocks[0, 2]].tolist() == [5]


def test_a_step_may_only_remove(batch: InputBatch) -> None:
    apply_step(batch, step(removed_rows=ints(2)))
    assert not batch.sampling


ENTER = (new(1, [1, 2], [5]),)
CONTRADICTIONS = {
    "removed_rows: row 3 is not in use": step(removed_rows=ints(3)),
    "removed_rows: row 2 is not in use": step(removed_rows=ints(2, 2)),
    "new_requests.row: row 2 is used by another request": step(enter=(new(2, [1], [5]),)),
    "new_requests.row: row 4 is not from 0 to 3": step(enter=(new(4, [1], [5]),)),
    "new_requests.token_ids: has 0 tokens": step(enter=(new(1, [], [5]),)),
    "new_requests.token_ids: has 17 tokens": step(enter=(new(1, [1] * 17, [5, 6, 7, 8, 9]),)),
    "new_requests.token_ids: token .100. is not from 0 to 99": step(enter=(new(1, [100], [5]),)),
    "new_requests.token_ids: token .-1. is not from 0 to 99": step(enter=(new(1, [-1], [5]),)),
    "new_requests.num_prompt_tokens: is 3, not 1 to 2": step(
        enter=(replace(ENTER[0], num_prompt_tokens=3),)
    ),
    "new_requests.block_tables: has 2 KV-cache groups, not 1": step(
        enter=(replace(ENTER[0], block_tables=(ints(1), ints(2))),)
    ),
    "new_requests.block_tables: block .20. is not from 1 to 19": step(enter=(new(1, [1], [20]),)),
    "new_requests.block_tables: block .0. is not from 1 to 19": step(enter=(new(1, [1], [0]),)),
    "new_requests.block_tables: has 5 blocks, more than 4": step(
        enter=(new(1, [1], [5, 6, 7, 8, 9]),)
    ),
    "appended_blocks: row 1 is not in use": step(appended_blocks=(appended((1, [5])),)),
    "appended_blocks: block .-3. is not": step(appended_blocks=(appended((2, [-3])),)),
    "appended_blocks: row 2 would have 5 blocks, more than 4": step(
        appended_blocks=(appended((2, [5, 6, 7])),)
    ),
    "appended_blocks: has 2 KV-cache groups": step(
        appended_blocks=(appended((2, [5])), appended((2, [6])))
    ),
    "appended_blocks: the number of block ids is not the sum": step(
        appended_blocks=(replace(appended((2, [5])), num_blocks=ints(2)),)
    ),
    "num_computed_tokens: has 0 entries for 1 rows": step((2, 1, 5), num_computed_tokens=ints()),
    "rows: row .1. is not in use": step((1, 1, 0)),
    "rows: row .9. is not in use": step((9, 1, 0)),
    "rows: has a row twice": step((2, 1, 0), (2, 1, 0)),
    "rows: row 2 would have 5 tokens, but its blocks have slots for 4": step(
        (2, 5, 0), removed_rows=ints(2), enter=(new(2, [1] * 5, [3]),)
    ),
    "num_scheduled_tokens: has 13 tokens, but a step has at most 12": step((2, 13, 0)),
    "num_scheduled_tokens: row 2 has only drafts to compute": step((2, 0, 0)),
    "num_computed_tokens: row 2 has 5 tokens, but its step begins after 6": step((2, 1, 5)),
    "num_computed_tokens: row 2 has 5 tokens, but its step begins after 4": step((2, 5, -1)),
    "num_computed_tokens: row 2 has 5 tokens, but its step begins after 2147483648": step(
        (2, 1, 2**31 - 1)
    ),
    "num_draft_tokens: has 1 entries for 2 rows": step(
        (2, 2, 3), (1, 1, 0), enter=ENTER, num_draft_tokens=ints(1)
    ),
    "num_draft_tokens: drafts of row 2 do not follow its 5 tokens": step(
        (2, 2, 3), num_draft_tokens=ints(1), draft_token_ids=ints(9)
    ),
    "draft_token_ids: the number of drafts is not the sum": step(
        (2, 2, 4), num_draft_tokens=ints(1), draft_token_ids=ints(9, 9)
    ),
    "draft_token_ids: token .-1.": step(
        (2, 2, 4), num_draft_tokens=ints(1), draft_token_ids=ints(-1)
    ),
    "rows: row 2 would have 9 tokens, but its blocks have slots for 8": step(
        (2, 5, 4), num_draft_tokens=ints(4), draft_token_ids=ints(1, 2, 3, 4)
    ),
}


@pytest.mark.parametrize("problem", CONTRADICTIONS)
def test_a_contradiction_is_refused_and_changes_nothing(batch: InputBatch, problem: str) -> None:
    contradiction = CONTRADICTIONS[problem]
    with pytest.raises(InvalidStep, match=f"^step 7: {problem}"):
        apply_step(batch, contradiction)
    assert batch.sampling.keys() == {2}
    assert batch.num_tokens[2] == 5
    assert batch.num_blocks[0, 2] == 2
    assert batch.block_tables[0, 2, :2].tolist() == [3, 4]


def test_a_sequence_at_its_greatest_length_cannot_go_on() -> None:
    batch = InputBatch(replace(LIMITS, max_num_batched_tokens=20))
    apply_step(batch, step((0, 16, 0), enter=(new(0, [1] * 16, [1, 2, 3, 4]),)))
    batch.append_one(ints(0), ints(2))
    with pytest.raises(InvalidStep, match="row 0 would have 17 tokens, more than max_model_len 16"):
        apply_step(batch, step((0, 1, 16)))


def test_sampling_parameters_are_checked_too(batch: InputBatch) -> None:
    bad = replace(ENTER[0], sampling=SamplingParams(temperature=float("nan")))
    with pytest.raises(InvalidArgument, match="temperature") as caught:
        apply_step(batch, step((1, 2, 0), enter=(bad,)))
    assert caught.value.field == "temperature"
    assert batch.sampling.keys() == {2}
    assert np.array_equal(batch.num_blocks, [[0, 0, 2, 0]])


@pytest.fixture
def hybrid() -> InputBatch:
    """A batch with two KV-cache groups, of which the second has a window. Row 1 enters with a
    prefix hit of two blocks. Only the second block is in the window.
    """
    batch = InputBatch(replace(LIMITS, windows=(None, 4)))
    tables = (ints(3, 4, 5), ints(0, 6, 7))
    entering = NewRequest(1, ints(*range(10, 19)), 9, GREEDY, tables)
    apply_step(batch, step((1, 1, 8), enter=(entering,)))
    return batch


def test_each_group_has_a_table(hybrid: InputBatch) -> None:
    for token_id in (50, 51, 52, 53):
        hybrid.append_one(ints(1), ints(token_id))
    grown = (appended((1, [8])), appended((1, [9])))
    apply_step(hybrid, step((1, 1, 12), appended_blocks=grown))
    assert hybrid.block_tables[:, 1].tolist() == [[3, 4, 5, 8], [0, 6, 7, 9]]


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ((ints(3),), "new_requests.block_tables: has 1 KV-cache groups, not 2"),
        ((ints(0, 3), ints(0, 4)), "new_requests.block_tables: block .0. is not from 1"),
        ((ints(2, 3), ints(4, 0)), "new_requests.block_tables: block .0. is not from 1"),
        ((ints(2, 3), ints(0, 0)), "new_requests.block_tables: block .0. is not from 1"),
        ((ints(2, 3), ints(4)), "rows: row 0 would have 5 tokens, but its blocks have slots for 4"),
    ],
)
def test_only_a_window_may_leave_the_beginning_of_a_table_empty(
    hybrid: InputBatch, tables: tuple[np.ndarray, ...], problem: str
) -> None:
    entering = NewRequest(0, ints(1, 2, 3, 4, 5), 5, GREEDY, tables)
    with pytest.raises(InvalidStep, match=f"^step 7: {problem}"):
        apply_step(hybrid, step((0, 5, 0), enter=(entering,)))


def stateful_batch(state_block_size: int = 4) -> InputBatch:
    """A batch with attention layers and recurrent states. Row 2 has six computed tokens."""
    limits = replace(LIMITS, windows=(None, None), state_block_sizes=(state_block_size,))
    batch = InputBatch(limits)
    tables = (ints(3, 4), ints(0, 8) if state_block_size == 4 else ints(8))
    request = NewRequest(2, ints(*range(10, 16)), 6, GREEDY, tables)
    apply_step(batch, step((2, 6, 0), enter=(request,)))
    batch.append_one(ints(2), ints(50))
    return batch


def test_state_groups_may_have_null_entries() -> None:
    batch = stateful_batch()
    batch.append_one(ints(2), ints(51))
    batch.append_one(ints(2), ints(52))
    grown = (appended((2, [5])), appended((2, [9])))
    apply_step(batch, step((2, 3, 6), appended_blocks=grown))
    assert batch.block_tables[1, 2, :3].tolist() == [0, 8, 9]
    assert batch.room[2] == 12


def test_a_state_that_is_overwritten_has_one_block_for_all_tokens() -> None:
    batch = stateful_batch(16)
    apply_step(batch, step((2, 1, 6)))
    assert batch.room[2] == 8  # the tokens for which attention has blocks


STATELESS = NewRequest(1, ints(1, 2, 3, 4, 5), 5, GREEDY, (ints(5, 6), ints(0, 0)))
STATE_CONTRADICTIONS = {
    "block_tables: row 1 has no block for the state after 5 tokens": step(
        (1, 5, 0), enter=(STATELESS,)
    ),
    "block_tables: row 1 has no block for the state after 4 tokens": step(
        (1, 1, 4), enter=(replace(STATELESS, block_tables=(ints(5, 6), ints(0, 7))),)
    ),
    "block_tables: row 2 has no block for the state after 9 tokens": step(
        (2, 3, 6), appended_blocks=(appended((2, [5])), appended((2, [0])))
    ),
    "num_draft_tokens: must be empty, because recurrent layers cannot verify drafts": step(
        (2, 2, 6), num_draft_tokens=ints(1), draft_token_ids=ints(9)
    ),
    "copy_targets: has 1 blocks for 2 copy_sources": step(
        copy_sources=ints(1, 2), copy_targets=ints(3)
    ),
    "copy_sources: block .20. is not": step(copy_sources=ints(20), copy_targets=ints(3)),
    "copy_targets: block .0. is not": step(copy_sources=ints(2), copy_targets=ints(0)),
}


@pytest.mark.parametrize("problem", STATE_CONTRADICTIONS)
def test_contradictions_of_states_are_refused_with_the_batch_unchanged(problem: str) -> None:
    batch = stateful_batch()
    for token_id in (51, 52):
        batch.append_one(ints(2), ints(token_id))
    if "drafts" in problem:
        batch.num_tokens[2] = 7
    with pytest.raises(InvalidStep, match=problem):
        apply_step(batch, STATE_CONTRADICTIONS[problem])
    assert batch.sampling.keys() == {2}
    assert batch.block_tables[:, 2, :3].tolist() == [[3, 4, 0], [0, 8, 0]]


def test_blocks_are_copied_only_where_layers_are_recurrent(batch: InputBatch) -> None:
    with pytest.raises(InvalidStep, match="copy_sources: must be empty"):
        apply_step(batch, step(copy_sources=ints(1), copy_targets=ints(3)))
