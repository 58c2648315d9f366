"""The port of decisions about the cached contexts of requests that have ended."""

from collections.abc import Iterable
from typing import Protocol

from services.common.pool.ids import ContextId
from services.common.pool.operations import Admission, Operation, Outcome
from services.scheduler.core.request import Request


class Retention(Protocol):
    """Decides which contexts of ended requests stay in the pool, and which requests may take their
    blocks. A policy that has one is told of all that happens to requests.
    """

    def arrived(self, request: Request) -> None:
        """A request was queued for the first time."""

    def admitted(self, request: Request, waiting: Iterable[Request]) -> None:
        """A request was admitted, one of those that wait."""

    def ended(self, request: Request) -> ContextId | None:
        """A request has ended. Returns the context that its blocks become, or None if the pool
        caches them like those of any other request.
        """

    def end_turn(self, context: ContextId, tool: str, *, ends: bool) -> None:
        """The tool that runs after the turn with this context is known ("" if none runs), or the
        turn was the last one of its program.
        """

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

    def held_up(self, num_running: int) -> None:
        """The next request was refused only because of blocks of contexts."""

    def forget(self) -> None:
        """The pool is empty."""
