"""Makes the errors of requests whose own parameters leave no token to sample."""

from collections.abc import Sequence

from services.common.errors import InvalidArgument
from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import FIELD
from services.gateway.core.request.request import EngineRequest

NAN_IN_LOGITS = FinishReason.NAN_IN_LOGITS.name
NO_CONFORMING_TOKEN = FinishReason.NO_CONFORMING_TOKEN.name


def why_no_token(
    request: EngineRequest, output: Sequence[int], vocab_size: int
) -> InvalidArgument | None:
    """Returns the error of a request for which no token could be sampled after the tokens `output`,
    or None if not the request, but NaN in the model's logits is the cause.
    """
    if request.prompt_embeds is not None:
        return InvalidArgument(
            "prompt_embeds: the model's logits held NaN with these embeddings",
            field="prompt_embeds",
            reason=NAN_IN_LOGITS,
        )
    if _bans_every_token(request.sampling, output, vocab_size):
        return InvalidArgument(
            "bad_words, allowed_token_ids and min_tokens together leave no token to sample after "
            f"{len(output)} tokens of this answer",
            field="bad_words",
        )
    return None


def nothing_conforms(request: EngineRequest, output: Sequence[int]) -> InvalidArgument | None:
    """Returns the error of a request that ended after the tokens `output` because no further token
    conformed to its structured-output constraint. The error names the parameters that ban tokens.
    Returns None if no parameter of the request bans tokens.
    """
    sampling = request.sampling
    banning = [name for name in ("allowed_token_ids", "bad_words") if getattr(sampling, name)]
    if not banning:
        return None
    return InvalidArgument(
        f"{FIELD}: {' and '.join(banning)} leave no token that conforms after {len(output)} "
        "tokens of this answer",
        field=FIELD,
        reason=NO_CONFORMING_TOKEN,
    )


def _bans_every_token(sampling: SamplingParams, output: Sequence[int], vocab_size: int) -> bool:
    """Whether every allowed token is banned as the next token. A token is banned if it would
    complete a bad word, or would end the answer before it has `min_tokens` tokens.
    """
    recent = tuple(output[-max(map(len, sampling.bad_words), default=0) :])
    banned = {
        word[-1]
        for word in sampling.bad_words
        if len(word) == 1 or recent[1 - len(word) :] == word[:-1]
    }
    if len(output) < sampling.min_tokens:
        banned.update(sampling.stop_token_ids, sampling.eos_token_ids)
    return banned.issuperset(sampling.allowed_token_ids or range(vocab_size))
