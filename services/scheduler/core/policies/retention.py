"""The port of decisions about the cached contexts of requests that have ended."""

from collections.abc import Collection, Iterable
from typing import Protocol

from services.common.pool.ids import ContextId, RequestKey
from services.common.pool.operations import Admission, Operation, Outcome
from services.scheduler.core.program_turn import PausedProgram
from services.scheduler.core.request import Request


class Retention(Protocol):
    """Decides which contexts of ended requests stay in the pool, and which requests may take their
    blocks. A policy that has one is told of all that happens to requests.
    """

    def check(self, request: Request) -> None:
        """Raises InvalidArgument, which names the field, if what a new request says about its
        program contradicts what is known.
        """

    def arrived(self, request: Request) -> None:
        """A request was queued for the first time."""

    def admitted(self, request: Request, waiting: Iterable[Request]) -> None:
        """A request was admitted, one of those that wait."""

    def ended(self, request: Request) -> ContextId | None:
        """A request has ended. Returns the context that its blocks become, or None if the pool
        caches them like the blocks of any other request.
        """

    def end_turn(self, context: ContextId, tool: str, *, ends: bool) -> None:
        """The tool that runs after the turn with this context is known ("" if none runs), or the
        turn was the last one of its program.
        """

    @property
    def held(self) -> Collection[RequestKey]:
        """The ended requests that keep their blocks until the policy frees them with
        `PolicyParts.release`.
        """

    def sweep(self) -> None:
        """Releases the requests that are held for too long. Called before each step is planned."""

    def make_room(self) -> bool:
        """Releases a held request, because nothing else can free the blocks that a request needs.
        Returns False if none is held.
        """

    def release_all(self) -> None:
        """Releases all held requests, because every block must become free."""

    def operations(self) -> list[Operation]:
        """The operations that precede all others of the next transaction."""

    def rank(self) -> list[Operation]:
        """The operations that precede the admissions of a step."""

    def note(self, outcome: Outcome) -> None:
        """Notes the outcome of a transaction."""

    def limit(self, terms: Admission, request: Request, num_running: int) -> None:
        """Sets in the terms of an admission beside `num_running` requests which blocks the request
        must not take.
        """

    def held_up(self, num_running: int) -> str:
        """The next request was refused only because of blocks of contexts. Returns for people which
        context is kept, and why.
        """

    def paused(self, most: int, now: float) -> list[PausedProgram]:
        """At most so many programs in a pause, those that paused last first. `now` is the time of
        the policy's clock, which is not read here, because a view must not change decisions.
        """

    def forget(self) -> None:
        """The pool is empty."""


class NoRetention:
    """Retains and holds nothing. Policies derive from it the parts of the port that they use."""

    @property
    def held(self) -> Collection[RequestKey]:
        return ()

    def check(self, request: Request) -> None: ...

    def arrived(self, request: Request) -> None: ...

    def admitted(self, request: Request, waiting: Iterable[Request]) -> None: ...

    def ended(self, request: Request) -> ContextId | None:  # noqa: ARG002
        return None

    def end_turn(self, context: ContextId, tool: str, *, ends: bool) -> None: ...

    def sweep(self) -> None: ...

    def make_room(self) -> bool:
        return False

    def release_all(self) -> None: ...

    def operations(self) -> list[Operation]:
        return []

    def rank(self) -> list[Operation]:
        return []

    def note(self, outcome: Outcome) -> None: ...

    def limit(self, terms: Admission, request: Request, num_running: int) -> None: ...

    def held_up(self, num_running: int) -> str:  # noqa: ARG002
        return ""

    def paused(self, most: int, now: float) -> list[PausedProgram]:  # noqa: ARG002
        return []

    def forget(self) -> None: ...
