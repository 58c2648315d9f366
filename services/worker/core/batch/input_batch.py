"""The input batch, in which the worker keeps the state of each running request between steps.

The scheduler sends a request completely once. The request gets a row of the batch, and later steps
contain only changes. The worker appends sampled tokens to its own copy, so that the scheduler can
plan and send a step before the previous step has run. This is vLLM's persistent batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.common.request.sampling import SamplingParams
from services.worker.backends.arrays import Int32Array, Int64Array
from services.worker.core.errors import InvalidStep
from services.worker.core.step import NewRequest, StepInput


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    block_size: int
    """The number of tokens in a block, in the attention groups with the smallest blocks."""
    num_blocks: int
    windows: tuple[int | None, ...] = (None,)
    """The attention window of each KV-cache group, in tokens. None means full attention."""
    state_block_sizes: tuple[int, ...] = ()
    """For each group of recurrent layers, the number of tokens that one block covers. These groups
    follow the groups of attention layers in the order of KV-cache groups.
    """
    num_tier_blocks: int = 0
    num_speculative_tokens: int = 0
    """Maximum number of draft tokens that this worker proposes for a request in a step."""
    num_speculative_rows: int = 0
    """Limit on the tokens of decoding requests in a step, including drafts. 0 means unlimited."""
    block_scales: tuple[int, ...] = ()
    """For each group of attention layers, the number of tokens in its blocks, as a multiple of
    `block_size`. If empty, all multiples are 1.
    """

    @property
    def num_groups(self) -> int:
        """Number of KV-cache groups, including groups of recurrent layers."""
        return len(self.windows)

    @property
    def first_state_group(self) -> int:
        return len(self.windows) - len(self.state_block_sizes)

    @property
    def max_sampled_rows(self) -> int:
        """Maximum number of rows of logits in a step, including those for drafts."""
        if self.num_speculative_rows:
            return max(self.max_num_seqs, self.num_speculative_rows)
        return self.max_num_seqs * (1 + self.num_speculative_tokens)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """For each KV-cache group, the number of tokens that one block covers."""
        scales = self.block_scales or (1,) * self.first_state_group
        return (*(scale * self.block_size for scale in scales), *self.state_block_sizes)

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks for a sequence of max_model_len tokens, in the group with the smallest blocks."""
        return -(-self.max_model_len // self.block_size)

    def room(self, num_blocks: Iterable[int]) -> int:
        """The number of tokens of one sequence that fit if it has `num_blocks` of each group."""
        if not (self.state_block_sizes or self.block_scales):
            return min(min(num_blocks) * self.block_size, self.max_model_len)
        sizes = zip(num_blocks, self.block_sizes, strict=True)
        return min(self.max_model_len, *(count * size for count, size in sizes))


class InputBatch:
    """The tokens, block tables and sampling parameters of running requests. Each request has a row.

    `step_difference.apply_step` applies a step. Arrays are indexed by row:

    * `token_ids` int32 [max_num_seqs, max_model_len + 1]. The first `num_tokens` of a row are
      known: the prompt, the output sent with the request, and the tokens sampled by this worker;
    * `num_prompt_tokens`;
    * `room`: the number of tokens that fit in a request's blocks, in the group with the least room;
    * `block_tables` int32 [num_groups, max_num_seqs, max_blocks_per_seq]. The first `num_blocks`
      [num_groups, max_num_seqs] entries of a table are set. Entries before a group's attention
      window are the null block or an earlier block of the request, and are not read. In groups of
      recurrent layers only two entries are read: for the last token before a step, and for the
      step's last token.

    `counting` is the array 0, 1, 2, ..., max_num_seqs. `groups` has, for each KV-cache group, its
    `block_tables` and the number of tokens that a block covers.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        rows = limits.max_num_seqs
        self.token_ids = np.zeros((rows, limits.max_model_len + 1), np.int32)
        self.counting = np.arange(rows + 1, dtype=np.int32)
        self._tokens_in_a_line = self.token_ids.reshape(-1)
        self.num_tokens = np.zeros(rows, np.int32)
        self.num_prompt_tokens = np.zeros(rows, np.int32)
        self.room = np.zeros(rows, np.int32)
        num_groups = len(limits.windows)
        self.block_tables = np.zeros((num_groups, rows, limits.max_blocks_per_seq), np.int32)
        self.groups = tuple(zip(self.block_tables, limits.block_sizes, strict=True))
        self.num_blocks = np.zeros((num_groups, rows), np.int32)
        self.sampling: dict[int, SamplingParams] = {}

    def clear(self) -> None:
        self.sampling.clear()

    def place_last_tokens(self, step: StepInput) -> None:
        """Writes the last scheduled token of each request. Only pipeline stages that do not sample
        need this. Raises InvalidStep if these tokens are missing in the step.
        """
        if len(step.last_token_ids) != len(step.rows):
            problem = "a pipeline stage that does not sample must be sent each request's last token"
            raise InvalidStep.in_field(step.step, "last_token_ids", problem)
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        self.token_ids[step.rows, ends - 1] = step.last_token_ids

    def place_drafts(self, step: StepInput) -> None:
        """Writes the step's drafts after the known tokens. Only accepted drafts become known."""
        if not len(step.draft_token_ids):
            return
        first = 0
        for row, count in zip(step.rows, step.num_draft_tokens, strict=False):
            known = self.num_tokens[row]
            drafts = step.draft_token_ids[first : first + count]
            self.token_ids[row, known : known + count] = drafts
            first += count

    def tokens_at(self, rows: Int32Array | Int64Array, positions: Int64Array) -> Int64Array:
        """Returns the tokens at these rows and positions.

        Uses one flat index. With two indexes NumPy would release the interpreter's lock, and a
        waiting event loop would delay the step.
        """
        indexes = rows * np.int64(self.token_ids.shape[1]) + positions
        token_ids: Int64Array = self._tokens_in_a_line[indexes].astype(np.int64)
        return token_ids

    def append_one(self, rows: Int64Array, token_ids: Int32Array) -> None:
        num_tokens = self.num_tokens[rows]
        self.token_ids[rows, num_tokens] = token_ids
        self.num_tokens[rows] = num_tokens + 1

    def append_unknown(self, rows: Int64Array) -> None:
        """Appends to each of these rows a token whose id the host does not have yet."""
        self.num_tokens[rows] += 1

    def enter(self, request: NewRequest) -> None:
        """Adds a request to its row, which must be free."""
        row = request.row
        self.sampling[row] = request.sampling
        self.num_tokens[row] = len(request.token_ids)
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_blocks[:, row] = 0
        for group, block_ids in enumerate(request.block_tables):
            self.grow(group, row, block_ids)

    def grow(self, group: int, row: int, block_ids: Int32Array) -> None:
        start = self.num_blocks[group, row]
        self.block_tables[group, row, start : start + len(block_ids)] = block_ids
        self.num_blocks[group, row] += len(block_ids)
        self.room[row] = self.limits.room(self.num_blocks[:, row].tolist())
