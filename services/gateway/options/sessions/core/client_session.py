"""Clients' sessions. A session is a prompt that grows turn by turn: each turn adds the client's
input and the generated output.

Only the gateway stores the tokens of a session. Between two turns, a replica keeps the session's KV
blocks and a slot of a running sequence, so that the next turn can start at once. If no replica
keeps them, the next turn is sent as a normal request with all tokens.
"""

from typing import Protocol

from services.common.errors import FailedPrecondition, StepwellError
from services.gateway.core.caller import Caller
from services.gateway.core.request.request import HeldSequence


class TurnListener(Protocol):
    """Is notified when a turn of a session begins or ends."""

    def turn_began(self, session: "ClientSession") -> None: ...

    def turn_ended(self, session: "ClientSession") -> None: ...


class ClientSession:
    """One session. At most one of its turns runs at a time."""

    def __init__(
        self, session_id: str, caller: Caller, created: int, listener: TurnListener
    ) -> None:
        """`created` is in seconds since 1970."""
        self.session_id = session_id
        self.caller = caller
        self.created = created
        self.token_ids: list[int] = []
        """All tokens of the completed turns. The next turn appends its tokens."""
        self.num_turns = 0
        self.is_in_turn = False
        self.held: HeldSequence | None = None
        """The session's sequence if a replica keeps it between two turns, and otherwise None."""
        self.ended: StepwellError | None = None
        """The error that further turns raise if the session has ended, and otherwise None."""
        self._listener = listener

    def check_idle(self) -> None:
        """Raises the error `ended` if the session has ended, and FailedPrecondition if a turn
        runs.
        """
        if self.ended is not None:
            raise self.ended
        if self.is_in_turn:
            raise FailedPrecondition(
                f"session {self.session_id} still generates a turn: the next turn can begin when "
                "that turn has ended",
                field="session",
                reason="SESSION_IN_TURN",
            )

    def begin_turn(self, number: int) -> None:
        """Starts the turn with this number. The first turn has the number 0. Raises
        FailedPrecondition if another turn is running, or a turn with this number was completed
        before. Raises the error `ended` if the session has ended.
        """
        self.check_idle()
        if number != self.num_turns:
            raise FailedPrecondition(
                f"another turn of session {self.session_id} began before this turn",
                field="session",
                reason="SESSION_IN_TURN",
            )
        self.is_in_turn = True
        self._listener.turn_began(self)

    def finish_turn(self, token_ids: list[int] | None) -> None:
        """Ends the turn. `token_ids` are all tokens of the session including the turn's. If it is
        None, the turn was not completed, and the session's tokens do not change.
        """
        self.is_in_turn = False
        if token_ids is not None:
            self.token_ids = token_ids
            self.num_turns += 1
        if self.held is not None and self.held.num_tokens > len(self.token_ids):
            self.release()
        self._listener.turn_ended(self)

    def take_held(self) -> HeldSequence | None:
        """Returns `held` and sets it to None. The caller must continue or release the sequence."""
        held, self.held = self.held, None
        return held

    def release(self) -> None:
        """If a replica keeps the session's sequence, makes the replica free it."""
        if (held := self.take_held()) is not None:
            held.release()

    def hold(self, held: HeldSequence) -> None:
        """Records that a replica keeps the sequence. Releases it if the session has ended."""
        if self.ended is None:
            self.held = held
        else:
            held.release()
