"""Reports programs to metrics. A program is the requests (turns) of one run of an agent. Its
context is the KV blocks that its last turn has left in the pool for the next turn.
"""

from collections.abc import Iterable
from enum import Enum

from services.common.pool.ids import ContextId
from services.scheduler.core.request import Request


class RecomputationCause(Enum):
    """Why tokens of a program were computed again."""

    EVICTED = "evicted"
    """Other requests got blocks of the context during the pause before the turn."""
    PREEMPTED = "preempted"
    """The turn was preempted."""
    LOST = "lost"
    """The pool or the workers were lost during the turn or the pause before it."""


class ProgramObserver:
    """Observes programs. This base class does nothing."""

    def began(self, *, is_named: bool) -> None:
        """Called when a program has begun. `is_named` says whether the client named it."""

    def returned(self, tool: str, pause_seconds: float) -> None:
        """Called when the next turn of a program has arrived after a pause."""

    def ended(self, seconds: float, num_turns: int) -> None:
        """Called when a program has ended or is presumed to have ended. `seconds` is the time from
        its first turn's arrival to its last turn's end.
        """

    def taken(self, num_blocks: int, *, waits: bool) -> None:
        """Called when a context lost blocks. `waits` says whether its next turn has arrived."""

    def recomputed(self, num_tokens: int, cause: RecomputationCause) -> None:
        """Called twice when a turn has ended, with the tokens that it computed again, perhaps 0."""


class Recomputations:
    """Counts the tokens that turns compute again, and determines the cause."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._lost: set[Request] = set()
        """Turns whose blocks or contexts were lost with the pool or the workers."""
        self._last_lost = ContextId(0)

    def returned(self, context: ContextId, request: Request) -> None:
        """Records the arrival of a turn that continues a context."""
        if context <= self._last_lost:
            self._lost.add(request)

    def lost(self, requests: Iterable[Request], last: ContextId) -> None:
        """Records that the blocks of `requests`, and of all contexts up to `last`, were lost."""
        self._lost.update(requests)
        self._last_lost = last

    def ended(self, request: Request, observer: ProgramObserver) -> None:
        """Reports the tokens that an ended turn computed again. Sets `num_recomputed_tokens`."""
        turn, is_lost = request.program_turn, request in self._lost
        assert turn is not None
        num_whole = turn.num_context_tokens // self._size * self._size
        turn.num_recomputed_tokens = max(0, num_whole - (request.num_cached_tokens or 0))
        for number, cause in (
            (turn.num_recomputed_tokens, RecomputationCause.EVICTED),
            (request.num_recomputed_tokens, RecomputationCause.PREEMPTED),
        ):
            observer.recomputed(number, RecomputationCause.LOST if is_lost else cause)
        self._lost.discard(request)
