"""The interface of policies that decide which contexts stay cached. A context is the KV blocks of
an ended request, kept for the next request of the same program (a run of an agent).
"""

from collections.abc import Collection, Iterable

from services.common.pool.ids import ContextId, RequestKey
from services.common.pool.operations import Admission, Operation, Outcome
from services.scheduler.core.program_turn import PausedProgram
from services.scheduler.core.request import Request


class Retention:
    """Decides which contexts stay in the pool, and which requests may evict their blocks. The
    scheduler calls the methods at each event that concerns a request. These methods keep no blocks.
    Policies override those that they need.
    """

    def check(self, request: Request) -> None:
        """Raises InvalidArgument if a request contradicts what is known of its program."""

    def arrived(self, request: Request) -> None:
        """Called when a request was queued for the first time."""

    def admitted(self, request: Request, waiting: Iterable[Request]) -> None:
        """Called when a request was admitted. `waiting` may still include the request."""

    def ended(self, request: Request) -> ContextId | None:  # noqa: ARG002
        """Called when a request has ended. Returns the context that its blocks become. None if the
        pool caches its blocks like any other blocks.
        """
        return None

    def end_turn(self, context: ContextId, tool: str, *, ends: bool) -> None:
        """Called when it is known which tool runs after the turn (request) that left `context`.
        `tool` is empty if none runs. If `ends` is true, the turn was its program's last.
        """

    @property
    def held(self) -> Collection[RequestKey]:
        """Ended requests that keep their blocks until the policy calls `PolicyParts.release`."""
        return ()

    def sweep(self) -> None:
        """Called before each step is planned. Releases `held` requests whose time is over."""

    def make_room(self) -> bool:
        """Releases a `held` request, because blocks are missing. Returns False if there is none."""
        return False

    def release_all(self) -> None:
        """Releases all `held` requests, because every block must become free."""

    def operations(self) -> list[Operation]:
        """The pool operations with which the next transaction must begin."""
        return []

    def rank(self) -> list[Operation]:
        """The pool operations that must precede the admissions of a step."""
        return []

    def note(self, outcome: Outcome) -> None:
        """Called with the outcome of each pool transaction."""

    def limit(self, terms: Admission, request: Request, num_running: int) -> None:
        """Sets in `terms` which blocks an admission beside `num_running` requests may use."""

    def held_up(self, num_running: int) -> str:  # noqa: ARG002
        """Called when only kept contexts have prevented the admission of the next request. Returns
        a text that explains which context is kept, and why.
        """
        return ""

    def paused(self, most: int, now: float) -> list[PausedProgram]:  # noqa: ARG002
        """At most `most` programs that pause between two turns, the latest pause first. Must use
        the time `now` and not read the policy's clock, whose readings the step log records.
        """
        return []

    def forget(self) -> None:
        """Called when the pool was opened again, and is empty."""
