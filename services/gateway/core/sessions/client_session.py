"""Clients' sessions. A session is a prompt that grows turn by turn: each turn adds the client's
input and the generated output.

A session consists of its tokens, which only the gateway stores. Between two turns a replica keeps
the session's blocks and a slot of a running sequence, so that the next turn can start at once. If
the replica does not keep them, the next turn is sent as a normal request with all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from services.common.errors import FailedPrecondition, InvalidArgument, StepwellError
from services.common.request.finish_reason import FinishReason
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from services.gateway.core.tenant import Tenant

if TYPE_CHECKING:
    from services.gateway.core.sessions.client_sessions import ClientSessions


class Holder(Protocol):
    """A replica that keeps clients' sessions between their turns."""

    def release(self, handle: int) -> None:
        """Ends a session at the replica. Does nothing if the session has ended."""


@dataclass(frozen=True, slots=True)
class HeldSession:
    """A session that a replica keeps between two turns. The last three fields are from its last
    turn.
    """

    holder: Holder
    handle: int
    """The handle of the session at the replica."""
    num_tokens: int
    """Number of the session's leading tokens that the replica keeps."""
    priority: int
    cache_salt: str
    adapter_digest: bytes

    def fits(self, request: EngineRequest) -> bool:
        """Whether the next turn can continue the kept session. The turn must have more tokens, must
        have the same priority, cache salt and adapter, and must not skip the prefix cache.
        """
        return (
            self.num_tokens < len(request.prompt_token_ids)
            and not request.skip_reading_prefix_cache
            and self.priority == request.priority
            and self.cache_salt == request.cache_salt
            and self.adapter_digest == request.adapter_digest
        )

    def release(self) -> None:
        """Ends the session at the replica."""
        self.holder.release(self.handle)


class ClientSession:
    """One session. At most one of its turns runs at a time."""

    def __init__(
        self, session_id: str, tenant: Tenant, created: int, sessions: "ClientSessions"
    ) -> None:
        """`created` is in seconds since 1970."""
        self.session_id = session_id
        self.tenant = tenant
        self.created = created
        self.token_ids: list[int] = []
        """The tokens before the next turn's prompt."""
        self.num_turns = 0
        """Number of completed turns."""
        self.is_in_turn = False
        self.held: HeldSession | None = None
        self.ended: StepwellError | None = None
        """The error that further turns raise, if the session has ended. Otherwise None."""
        self._sessions = sessions

    def check_idle(self) -> None:
        """Raises FailedPrecondition if a turn is running. Raises `ended` if the session has
        ended.
        """
        if self.ended is not None:
            raise self.ended
        if self.is_in_turn:
            raise FailedPrecondition(
                f"session {self.session_id} is in a turn: the next one can begin when it is over",
                field="session",
                reason="SESSION_IN_TURN",
            )

    def begin_turn(self, number: int) -> None:
        """Starts the turn with this number, which counts from 0. Raises FailedPrecondition if
        another turn is running, or another turn with this number was completed.
        """
        self.check_idle()
        if number != self.num_turns:
            raise FailedPrecondition(
                f"another turn of session {self.session_id} came first",
                field="session",
                reason="SESSION_IN_TURN",
            )
        self.is_in_turn = True
        self._sessions.turn_began(self)

    def end_turn(self, token_ids: list[int] | None) -> None:
        """Ends the turn. `token_ids` are all tokens of the session after the turn. If the turn was
        not completed, they are None, and the session's tokens are unchanged.
        """
        self.is_in_turn = False
        if token_ids is not None:
            self.token_ids = token_ids
            self.num_turns += 1
        if self.held is not None and self.held.num_tokens > len(self.token_ids):
            self.release()
        self._sessions.turn_ended(self)

    def take_held(self) -> HeldSession | None:
        """Returns the session that a replica keeps, and sets it to None here. The caller must
        continue or release it.
        """
        held, self.held = self.held, None
        return held

    def release(self) -> None:
        """If a replica keeps the session, ends it there."""
        if (held := self.take_held()) is not None:
            held.release()

    def hold(self, held: HeldSession) -> None:
        """Records that a replica keeps the session. If the session has ended, releases it at the
        replica.
        """
        if self.ended is None:
            self.held = held
        else:
            held.release()


def in_session(request: ClientRequest) -> ClientRequest:
    """Returns the request of a turn with its whole prompt: the session's tokens, followed by the
    turn's tokens. Raises InvalidArgument for a parameter that sessions do not support, and
    FailedPrecondition while another turn runs.
    """
    session = request.session
    if session is None:
        return request
    session.check_idle()
    sampling, prompt = request.sampling, request.prompts[0] if request.prompts else Prompt([])
    for field, is_given, why in (
        ("n", request.n > 1, "a session has one answer to go on from"),
        ("best_of", (request.best_of or 1) > 1, "a session has one answer to go on from"),
        ("prompt", len(request.prompts) > 1, "a turn has one prompt"),
        ("prompt_embeds", prompt.embeds is not None, "a session has tokens only"),
        ("echo", prompt.text is not None or request.prompt_only, "only the answer is returned"),
        (
            "prompt_logprobs",
            sampling.prompt_logprobs is not None,
            "most of the prompt is not computed again",
        ),
    ):
        if is_given:
            raise InvalidArgument(f"{field} cannot be given in a session: {why}", field=field)
    if not prompt.token_ids:
        raise InvalidArgument("prompt must not be empty: it has no tokens", field="prompt")
    whole = Prompt([*session.token_ids, *prompt.token_ids])
    return replace(request, prompts=(whole,), turn=session.num_turns)


def tokens_after(
    request: EngineRequest,
    output_token_ids: Sequence[int],
    reason: FinishReason,
    *,
    by_token: bool,
) -> list[int]:
    """Returns the session's tokens after a turn with this output. If `by_token` is true, an
    end-of-sequence or stop token ended the turn, and is omitted, as in vLLM. All other tokens are
    kept, including the tokens of a stop string.
    """
    tokens = [*request.prompt_token_ids, *output_token_ids]
    if reason is FinishReason.STOP and by_token:
        del tokens[-1]
    return tokens
