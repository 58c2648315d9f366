"""From a body's parameters to the core's, for both APIs."""

from dataclasses import replace

from services.common.errors import InvalidArgument
from services.common.repetition import RepetitionDetection
from services.gateway.adapters.http.bodies import RepetitionDetectionBody, SamplingBody
from services.gateway.core.inference import Inference
from services.gateway.core.sampling import Sampling

_MASK = 2**64 - 1
# What vLLM's clients write for top_k when they want no limit.
_EVERY_TOKEN = -1


async def to_sampling(
    body: SamplingBody,
    inference: Inference,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Sampling:
    """Sampling parameters of a body; what it does not say is the server's default."""
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "min_tokens",
        )
        if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        given["top_k"] = 0 if body.top_k == _EVERY_TOKEN else body.top_k
    return replace(
        inference.default_sampling,
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=_allowed(body.allowed_token_ids),
        bad_words=await inference.bad_words(body.bad_words or ()),
        seed=None if body.seed is None else body.seed & _MASK,
        max_tokens=max_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        repetition_detection=_repetition(body.repetition_detection),
        **given,
    )


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    """The stop strings of a body, one or many."""
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def check_stream_options(body: SamplingBody) -> None:
    """Raises InvalidArgument for options of a stream where there is none."""
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument(
            "stream_options may only be given with stream=true", field="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs cannot be streamed; leave out stream or prompt_logprobs",
            field="prompt_logprobs",
        )


def _repetition(body: RepetitionDetectionBody | None) -> RepetitionDetection | None:
    if body is None:
        return None
    return RepetitionDetection.of(body.max_pattern_size, body.min_pattern_size, body.min_count)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    shifts = {}
    for token, shift in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 11):
            raise InvalidArgument(
                f"logit_bias: keys are token ids, not {token[:40]!r}", field="logit_bias"
            )
        shifts[int(token)] = shift
    return shifts


def _allowed(token_ids: list[int] | None) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if not token_ids:
        raise InvalidArgument(
            "allowed_token_ids must not be empty: nothing could be generated",
            field="allowed_token_ids",
        )
    return tuple(token_ids)
