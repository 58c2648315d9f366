"""Requests that are turns of a client's session, a prompt that grows turn by turn."""

from collections.abc import Sequence
from dataclasses import replace

from services.common.errors import InvalidArgument
from services.common.request.finish import FinishReason
from services.gateway.core.request.request import ClientRequest, EngineRequest, HeldSequence, Prompt
from services.gateway.options.sessions.core.client_session import ClientSession


class SessionTurn:
    """One turn of a session, and the turn's tokens. Implements the interface `Turn`."""

    def __init__(self, session: ClientSession, prompt_token_ids: Sequence[int]) -> None:
        """`prompt_token_ids` are the session's tokens, followed by the turn's input."""
        self.number = session.num_turns
        """The turn's number. The first turn of a session has the number 0."""
        self._session = session
        self._token_ids = [*prompt_token_ids]
        self._is_running = self._is_complete = False

    def begin(self) -> None:
        """Starts the turn. Raises FailedPrecondition if another turn is running, or was completed
        after this object was made.
        """
        self._session.begin_turn(self.number)
        self._is_running = True

    def add(
        self, token_ids: Sequence[int], reason: FinishReason | None, stop: str | int | None
    ) -> None:
        """Adds generated tokens to the turn. As in vLLM, an end-of-sequence or stop token that
        ended the turn is omitted. The tokens of a stop string are kept.
        """
        self._token_ids += token_ids
        self._is_complete = reason is not None
        if reason is FinishReason.STOP and not isinstance(stop, str):
            del self._token_ids[-1]

    def end(self) -> None:
        if self._is_running:
            self._is_running = False
            self._session.finish_turn(self._token_ids if self._is_complete else None)

    def take_held(self, request: EngineRequest) -> HeldSequence | None:
        """Returns the sequence that a replica keeps for the session, if `request` can continue it:
        `request` must have more tokens than the sequence, equal it in priority, cache salt and
        adapter, and not skip the prefix cache. Otherwise releases the sequence and returns None.
        """
        held = self._session.take_held()
        if held is None or (
            held.num_tokens < len(request.prompt_token_ids)
            and not request.skip_reading_prefix_cache
            and held.priority == request.priority
            and held.cache_salt == request.cache_salt
            and held.adapter_digest == request.adapter_digest
        ):
            return held
        held.release()
        return None

    def hold(self, held: HeldSequence) -> None:
        self._session.hold(held)

    def drop_held(self) -> None:
        self._session.held = None


def turn_of(session: ClientSession, request: ClientRequest) -> ClientRequest:
    """Makes the request of a turn. Its prompt consists of the session's tokens, followed by the
    prompt of `request`. Raises InvalidArgument for a parameter that sessions do not support, and
    FailedPrecondition while another turn runs.
    """
    session.check_idle()
    sampling, prompt = request.sampling, request.prompts[0] if request.prompts else Prompt([])
    for field, is_given, why in (
        ("n", request.n > 1, "a turn of a session has one answer"),
        ("best_of", (request.best_of or 1) > 1, "a turn of a session has one answer"),
        ("prompt", len(request.prompts) > 1, "a turn has one prompt"),
        ("prompt_embeds", prompt.embeds is not None, "a session contains tokens only"),
        ("echo", prompt.text is not None or request.prompt_only, "only the answer is returned"),
        (
            "prompt_logprobs",
            sampling.prompt_logprobs is not None,
            "the tokens of earlier turns are not computed again",
        ),
    ):
        if is_given:
            raise InvalidArgument(f"{field} cannot be given in a session: {why}", field=field)
    if not prompt.token_ids:
        raise InvalidArgument("prompt must not be empty: the prompt has no tokens", field="prompt")
    whole = Prompt([*session.token_ids, *prompt.token_ids])
    return replace(request, prompts=(whole,), turn=SessionTurn(session, whole.token_ids))
