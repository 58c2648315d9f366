"""Keeps the ranks of a group at the same step, and holds what they make of it against each other.

The ranks are sent the same bytes, but each over a stream of its own; when streams end, one may have
begun a step that another never saw. So before each step the ranks say which one they are about to
run. Steps of a newer generation win: a rank with an older one drops it, and the others wait for it.
Newer is greater, also where a clock was set back: workers say which generation they saw last, and
a pool begins none below it.

Every so many steps a digest of what went in and of what came out travels with that, some steps
later, when no device computes it any more. Sums over ranks are the same bits on each, and so must
be all that is made of them; where it is not, memory or a kernel is broken, and no token after that
can be trusted.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import torch

from services.common.errors import Aborted, InvalidArgument
from services.worker.core.device_tokens import PendingOutput
from services.worker.core.step import StepInput, StepOutput
from services.worker.parallel.errors import GroupBroken
from services.worker.parallel.ranks import Ranks

_LAG = 2
"""Steps between one and the comparison of its results: as many as may be in flight."""

_Output = StepOutput | PendingOutput


class Lockstep:
    """Runs this rank's steps together with those of its peers.

    `explain` takes a failure and gives back what to raise, the end of a peer where that caused it;
    whoever made it ends the process.
    """

    def __init__(
        self, ranks: Ranks, check_every_steps: int, explain: Callable[[GroupBroken], GroupBroken]
    ) -> None:
        self._ranks = ranks
        self._check_every_steps = check_every_steps
        self._explain = explain
        self._generation: int | None = None
        self._begun: deque[_Checked | None] = deque([None] * _LAG, _LAG)
        self._current: _Checked | None = None

    def run(self, step: StepInput, begin: Callable[[StepInput], _Output]) -> _Output:
        """`begin(step)`, on all ranks at once.

        Raises Aborted for a step that was overtaken, GroupBroken when the ranks cannot go on.
        """
        try:
            self._meet(step)
            checked = step.step % self._check_every_steps == 0
            self._current = _Checked(step) if checked else None
            output = begin(step)
        except (InvalidArgument, Aborted):  # the same bytes are refused everywhere
            raise
        except GroupBroken as error:
            raise self._explain(error) from error
        except Exception as error:
            line = (str(error).splitlines() or [""])[0]
            failed = GroupBroken(f"step {step.step} failed on rank {self._ranks.rank}: {line}")
            raise self._explain(failed) from error
        if self._current is not None:
            self._current.output = output
        self._begun.append(self._current)
        return output

    def saw(self, hidden: torch.Tensor) -> None:
        """The hidden states of the step that is run."""
        if self._current is not None:
            self._current.add(hidden.detach().view(torch.uint8).cpu().numpy())

    def _meet(self, step: StepInput) -> None:
        """Returns when every rank is about to run this step."""
        if step.generation != self._generation:
            self._generation = step.generation
            self._begun.extend([None] * _LAG)
        due = self._begun[0]
        own = [step.generation, step.step, 0 if due is None else due.digest()]
        while True:
            said = self._ranks.exchange(own)
            newest = max(generation for generation, _, _ in said)
            if step.generation < newest:
                self._generation = None
                raise Aborted(f"step {step.step} is of a generation that is over")
            if all(generation == newest for generation, _, _ in said):
                break
        if len({number for _, number, _ in said}) > 1:
            raise GroupBroken(f"the ranks are at different steps: {[x[1] for x in said]}")
        if due is not None and len({digest for _, _, digest in said}) > 1:
            raise GroupBroken(
                f"the ranks computed different results in step {due.step.step}: "
                f"{[f'{digest:x}' for _, _, digest in said]}"
            )


class _Checked:
    """A step whose results are to be compared."""

    def __init__(self, step: StepInput) -> None:
        self.step = step
        self.output: _Output | None = None
        self._digest = blake2b(digest_size=8)
        for array in (
            *(step.rows, step.num_scheduled_tokens, step.num_computed_tokens),
            *(step.removed_rows, step.block_ids_to_zero),
            *(step.num_draft_tokens, step.draft_token_ids),
            *(request.token_ids for request in step.new_requests),
            *(table for request in step.new_requests for table in request.block_tables),
            *(appended.block_ids for appended in step.appended_blocks),
        ):
            self.add(array)

    def add(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> None:
        """Takes an array into the digest."""
        self._digest.update(len(array).to_bytes(8, "little"))
        self._digest.update(np.ascontiguousarray(array).data)

    def digest(self) -> int:
        """Of input, hidden states and output; waits for a device that still computes it."""
        output = self.output.wait() if isinstance(self.output, PendingOutput) else self.output
        if output is not None:
            for array in (output.num_tokens, output.token_ids, output.nan_requests):
                self.add(array)
        return int.from_bytes(self._digest.digest(), "little") >> 1
