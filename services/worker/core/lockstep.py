"""Runs each step on all ranks of a group together, and compares the ranks' results.

The ranks receive the same steps, each rank over its own stream. When streams end, one rank may have
received a step that another rank has not received. Therefore the ranks exchange generation and
number of their steps before each step. The generation is a number that increases when the scheduler
opens the KV pool and its streams again. A rank with a step of an older generation drops the step,
while the other ranks wait for its step of the newest generation. A newer generation always has a
greater number, even if a clock was set back, because workers report the last generation that they
received, and the pool's next generation is greater.

Together with the numbers, the ranks exchange digests of their steps' messages. If the digests
differ, all ranks refuse the step.

At regular intervals the ranks also exchange a digest of a step's input and output, some steps
later, when no device computes this step any more. Sums over ranks have the same bits on each rank,
so everything computed from them must be equal. If these digests differ, memory or a kernel is
faulty, and no later token can be trusted.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch

from services.common.errors import Aborted, InvalidArgument
from services.worker.backends.ranks import Ranks
from services.worker.core.errors import InvalidStep
from services.worker.core.sampled import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.parallel.errors import GroupBroken

_LAG = 2
"""A step's results are compared this many steps later, because up to two steps are in flight."""

_Output = StepOutput | PendingOutput


class Lockstep:
    """Runs this rank's steps together with the steps of the other ranks.

    `explain` returns the error to raise for a failure of an exchange. If another rank's process has
    ended, this error says why. The owner of the group then ends this process.
    """

    def __init__(
        self,
        ranks: Ranks,
        check_every_steps: int,
        explain: Callable[[GroupBroken], GroupBroken],
        rank: int | None = None,
    ) -> None:
        """`rank` is this rank's number in error messages. The default is its index in `ranks`."""
        self._ranks = ranks
        self._rank = ranks.rank if rank is None else rank
        self._check_every_steps = check_every_steps
        self._explain = explain
        self._generation: int | None = None
        self._begun: deque[_Checked | None] = deque([None] * _LAG, _LAG)
        self._current: _Checked | None = None

    def run(self, step: StepInput, begin: Callable[[StepInput], _Output]) -> _Output:
        """Calls `begin(step)` when all ranks are about to run the step.

        Raises Aborted for a step of an older generation, and GroupBroken if the ranks cannot
        continue. If the ranks were sent different steps, every rank raises InvalidStep.
        """
        try:
            self._agree_on(step)
            checked = step.step % self._check_every_steps == 0
            self._current = _Checked(step) if checked else None
            output = begin(step)
        except (InvalidArgument, Aborted):  # all ranks raise them
            raise
        except GroupBroken as error:
            raise self._explain(error) from error
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            failed = GroupBroken(f"step {step.step} failed on rank {self._rank}: {line}")
            raise self._explain(failed) from error
        if self._current is not None:
            self._current.output = output
        self._begun.append(self._current)
        return output

    def add_hidden_states(self, hidden: torch.Tensor) -> None:
        """Adds hidden states to the digest of the current step, if this step is compared."""
        if self._current is not None:
            self._current.add(hidden.detach().view(torch.uint8).cpu().numpy())

    def _agree_on(self, step: StepInput) -> None:
        if step.generation != self._generation:
            self._generation = step.generation
            self._begun.extend([None] * _LAG)
        due = self._begun[0]
        own = [step.generation, step.step, step.digest, 0 if due is None else due.digest()]
        while True:
            exchanged = self._ranks.exchange(own)
            newest = max(generation for generation, *_ in exchanged)
            if step.generation < newest:
                self._generation = None
                raise Aborted(
                    f"step {step.step} belongs to generation {step.generation}, which has ended"
                )
            if all(generation == newest for generation, *_ in exchanged):
                break
        if len({(number, sent) for _, number, sent, _ in exchanged}) > 1:
            raise InvalidStep(
                f"step {step.step}: the scheduler sent a different step to another rank"
            )
        if due is not None and len({digest for *_, digest in exchanged}) > 1:
            raise GroupBroken(
                f"the ranks computed different results in step {due.step.step}: "
                f"{[f'{digest:x}' for *_, digest in exchanged]}"
            )


class _Checked:
    def __init__(self, step: StepInput) -> None:
        self.step = step
        self.output: _Output | None = None
        self._digest = blake2b(digest_size=8)
        for array in (
            *(step.rows, step.num_scheduled_tokens, step.num_computed_tokens),
            *(step.removed_rows, step.block_ids_to_zero),
            *(step.copy_sources, step.copy_targets),
            *(step.num_draft_tokens, step.draft_token_ids, step.last_token_ids),
            *(request.token_ids for request in step.new_requests),
            *(table for request in step.new_requests for table in request.block_tables),
            *(appended.block_ids for appended in step.appended_blocks),
        ):
            self.add(array)

    def add(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> None:
        self._digest.update(len(array).to_bytes(8, "little"))
        self._digest.update(np.ascontiguousarray(array).data)

    def digest(self) -> int:
        """The digest of the step's input, hidden states and output. Waits for the output."""
        output = self.output
        if output is not None:
            output = output if isinstance(output, StepOutput) else output.wait()
            for array in (output.num_tokens, output.token_ids, output.nan_requests):
                self.add(array)
        return int.from_bytes(self._digest.digest(), "little") >> 1
