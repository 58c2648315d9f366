"""The persistent batch: what the worker remembers of each running request between steps.

A request is sent once, in full, and takes a slot. After that only differences arrive, and the
worker appends what it samples to its own copy of the tokens, so that a step can be planned and sent
before the one ahead of it has run. The idea is vLLM's persistent input batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.common.sampling import SamplingParams
from services.worker.core.step import Int32Array, NewRequest, StepInput
from services.worker.core.step_check import StepCheck


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What the batch can hold, and what a step may ask for.

    `windows`: of each KV-cache group, the tokens that its layers see; None: all of them.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    block_size: int
    num_blocks: int
    windows: tuple[int | None, ...] = (None,)

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of a sequence of the greatest length."""
        return -(-self.max_model_len // self.block_size)

    def room(self, num_blocks: int) -> int:
        """Tokens of a sequence that so many blocks hold."""
        return min(num_blocks * self.block_size, self.max_model_len)


class PersistentBatch:
    """Slots with their tokens, block tables and sampling parameters.

    `apply` checks a step against the batch and only then changes it. Arrays are indexed by slot:

    * `token_ids` int32 [max_num_seqs, max_model_len + 1], of which `num_tokens` are known: prompt,
      output so far, and what was sampled here since;
    * `num_prompt_tokens`;
    * `room`: tokens that a request's blocks hold, in the group with the fewest;
    * `block_tables` int32 [num_groups, max_num_seqs, max_blocks_per_seq], of which
      `num_blocks` [num_groups, max_num_seqs] are set. Where a window has moved on an entry is the
      null block or whatever it was before: nobody reads it.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        slots = limits.max_num_seqs
        self.token_ids = np.zeros((slots, limits.max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(slots, np.int32)
        self.num_prompt_tokens = np.zeros(slots, np.int32)
        self.room = np.zeros(slots, np.int32)
        num_groups = len(limits.windows)
        self.block_tables = np.zeros((num_groups, slots, limits.max_blocks_per_seq), np.int32)
        self.num_blocks = np.zeros((num_groups, slots), np.int32)
        self.sampling: dict[int, SamplingParams] = {}

    @property
    def slots(self) -> list[int]:
        """Slots in use."""
        return sorted(self.sampling)

    def clear(self) -> None:
        """Forgets every request."""
        self.sampling.clear()

    def apply(self, step: StepInput) -> None:
        """Takes over the difference that `step` brings. Raises InvalidStep, changing nothing."""
        StepCheck(self, step).run()
        for slot in step.removed_slots.tolist():
            del self.sampling[slot]
        for request in step.new_requests:
            self._enter(request)
        for group, appended in enumerate(step.appended_blocks):
            first = 0
            for slot, count in zip(appended.slots, appended.num_blocks, strict=True):
                self._grow(group, slot, appended.block_ids[first : first + count])
                first += count

    def append_one(self, slots: Int32Array, token_ids: Int32Array) -> None:
        """Adds one sampled token to each of some requests."""
        self.token_ids[slots, self.num_tokens[slots]] = token_ids
        self.num_tokens[slots] += 1

    def append(self, slot: int, token_ids: Sequence[int] | Int32Array) -> None:
        """Adds sampled tokens to a request's known ones."""
        start = self.num_tokens[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids
        self.num_tokens[slot] += len(token_ids)

    def expect(self, slots: Int32Array) -> None:
        """One more token of each of these requests; which one is not known here."""
        self.num_tokens[slots] += 1

    def _enter(self, request: NewRequest) -> None:
        slot = request.slot
        self.sampling[slot] = request.sampling
        self.num_tokens[slot] = 0
        self.num_blocks[:, slot] = 0
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        self.append(slot, request.token_ids)
        for group, block_ids in enumerate(request.block_tables):
            self._grow(group, slot, block_ids)

    def _grow(self, group: int, slot: int, block_ids: Int32Array) -> None:
        start = self.num_blocks[group, slot]
        self.block_tables[group, slot, start : start + len(block_ids)] = block_ids
        self.num_blocks[group, slot] += len(block_ids)
        self.room[slot] = self.limits.room(int(self.num_blocks[:, slot].min()))
