"""What is told to metrics about programs."""

from collections.abc import Iterable
from enum import Enum

from services.common.pool.ids import ContextId
from services.scheduler.core.request import Request


class RecomputationCause(Enum):
    """Why tokens of a program were computed again."""

    EVICTED = "evicted"
    """Other requests took blocks of the context in the pause."""
    PREEMPTED = "preempted"
    """The turn was preempted."""
    LOST = "lost"
    """Pool or workers were lost in the pause or in the turn."""


class ProgramObserver:
    """Is told what happens to programs. The methods do nothing here."""

    def began(self, *, is_named: bool) -> None:
        """A program began. `is_named` is whether the client named it."""

    def returned(self, tool: str, pause_seconds: float) -> None:
        """The next turn of a program arrived after a pause."""

    def ended(self, seconds: float, num_turns: int) -> None:
        """A program ended, or is presumed to have ended at the end of its last turn."""

    def taken(self, num_blocks: int, *, waits: bool) -> None:
        """A context lost blocks. `waits` is whether its next turn has arrived."""

    def recomputed(self, num_tokens: int, cause: RecomputationCause) -> None:
        """A turn had to compute tokens again. The number may be 0."""


class Recomputations:
    """Finds out why turns computed tokens again."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._lost: set[Request] = set()
        """Turns that lost their blocks or contexts with the pool, or with workers."""
        self._last_lost = ContextId(0)

    def returned(self, context: ContextId, request: Request) -> None:
        """A turn that begins with a context arrived."""
        if context <= self._last_lost:
            self._lost.add(request)

    def lost(self, requests: Iterable[Request], last: ContextId) -> None:
        """The blocks of these turns, and of all contexts up to the last one, were lost."""
        self._lost.update(requests)
        self._last_lost = last

    def ended(self, request: Request, observer: ProgramObserver) -> None:
        """A turn has ended. Sets how many tokens of its context it computed again."""
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
