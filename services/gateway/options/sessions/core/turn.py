"""Requests that are turns of a client's session."""

from collections.abc import Sequence
from dataclasses import replace

from services.common.errors import InvalidArgument
from services.common.request.finish_reason import FinishReason
from services.gateway.core.request.request import ClientRequest, EngineRequest, Prompt
from services.gateway.options.sessions.core.client_session import HeldSession


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


def fits(held: HeldSession, request: EngineRequest) -> bool:
    """Whether the next turn can continue a kept session. The turn must have more tokens, must
    have the same priority, cache salt and adapter, and must not skip the prefix cache.
    """
    return (
        held.num_tokens < len(request.prompt_token_ids)
        and not request.skip_reading_prefix_cache
        and held.priority == request.priority
        and held.cache_salt == request.cache_salt
        and held.adapter_digest == request.adapter_digest
    )
