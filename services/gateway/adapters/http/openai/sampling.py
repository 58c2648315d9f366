"""Converts the fields that completions and chat completions share to the core's request and
sampling parameters.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from services.common.errors import InvalidArgument
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.common.request.structured_outputs import StructuredOutputs, StructuredOutputsKind
from services.gateway.adapters.http.openai.bodies import SamplingBody, StreamOptions
from services.gateway.adapters.http.openai.formats import wanted_form
from services.gateway.adapters.http.openai.sampling_fields import (
    CommonSamplingFields,
    RepetitionDetectionBody,
    SamplingFields,
)
from services.gateway.adapters.telemetry.high_temperature import noted
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest, Prompt

_MASK, _SIGN = 2**64 - 1, 2**63
_EVERY_TOKEN = -1
"""The value with which vLLM's clients disable top_k."""


def client_request(
    body: SamplingBody,
    request_id: str,
    prompts: tuple[Prompt, ...],
    sampling: SamplingParams,
    **own: Any,
) -> ClientRequest:
    """Makes the request from a body. `own` are fields of the request that only one API has."""
    return ClientRequest(
        request_id=request_id,
        prompts=prompts,
        sampling=sampling,
        n=1 if body.n is None else body.n,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        skip_reading_prefix_cache=bool(body.skip_reading_prefix_cache),
        session_id=body.prompt_cache_key or "",
        **own,
    )


async def sampling_from_body(
    body: SamplingBody,
    inference: Inference,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Returns the sampling parameters of a body. A parameter that the body lacks has the server's
    default.
    """
    logit_bias = _logit_bias(body.logit_bias)
    sampling = replace(
        inference.default_sampling,
        logit_bias_token_ids=tuple(logit_bias),
        logit_bias_values=tuple(logit_bias.values()),
        bad_words=await inference.texts.bad_words(body.bad_words or ()),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=await wanted_form(
            body.response_format, body.structured_outputs, inference.tokenizer
        ),
        **given_parameters(body),
    )
    return noted(sampling)


def given_parameters(body: CommonSamplingFields) -> dict[str, Any]:
    """Returns the sampling parameters that fields of the same name set in the body."""
    return {
        name: _READERS[name](value) if name in _READERS else value
        for name in _SAME_NAMES
        if (value := getattr(body, name, None)) is not None
    }


def written_parameters(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the body fields in WRITTEN_NAMES that set these parameters, without null and empty
    values.
    """
    bias = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
    texts = {"logit_bias": {str(token): value for token, value in bias}}
    values = {name: getattr(sampling, name) for name in WRITTEN_NAMES if name not in texts} | texts
    return {
        name: _WRITERS[name](value) if name in _WRITERS else value
        for name, value in values.items()
        if value is not None and value not in ((), {})
    }


def check_texts(texts: Sequence[str], field: str) -> None:
    """Raises InvalidArgument if a text is empty. If there are several texts, the error names the
    index.
    """
    if "" in texts:
        name = field if len(texts) == 1 else f"{field}[{texts.index('')}]"
        raise InvalidArgument(f"{name} must not be empty", field=name)


def check_stream_options(body: SamplingBody) -> None:
    """Raises InvalidArgument if the body has stream options but is not streamed, or has
    prompt_logprobs and is streamed.
    """
    options = body.stream_options or StreamOptions()
    if (options.include_usage or options.continuous_usage_stats) and not body.stream:
        raise InvalidArgument(
            "stream_options may only be given with stream=true", field="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs cannot be streamed; leave out stream or prompt_logprobs",
            field="prompt_logprobs",
        )


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    shifts = {}
    for token, shift in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 11):
            raise InvalidArgument(
                f"logit_bias: keys are token ids, not {token[:40]!r}", field="logit_bias"
            )
        shifts[int(token)] = shift
    return shifts


def _allowed(token_ids: list[int]) -> tuple[int, ...]:
    if not token_ids:
        raise InvalidArgument(
            "allowed_token_ids must not be empty: nothing could be generated",
            field="allowed_token_ids",
        )
    return tuple(token_ids)


def _form_body(wanted: StructuredOutputs) -> dict[str, Any]:
    is_list = wanted.kind is StructuredOutputsKind.CHOICE
    return {wanted.kind.value: json.loads(wanted.text) if is_list else wanted.text}


def _repetition(body: RepetitionDetectionBody) -> RepetitionDetection | None:
    return RepetitionDetection.of(body.max_pattern_size, body.min_pattern_size, body.min_count)


_READERS: dict[str, Callable[[Any], object]] = {
    "top_k": lambda top_k: 0 if top_k == _EVERY_TOKEN else top_k,
    "seed": lambda seed: seed & _MASK,
    "allowed_token_ids": _allowed,
    "stop_token_ids": tuple,
    "repetition_detection": _repetition,
}
"""Functions that convert values of body fields to parameters, for values that are not numbers or
have another meaning in the core.
"""

_COMPUTED = {
    "logit_bias_token_ids",
    "logit_bias_values",
    "bad_words",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "eos_token_ids",
    "structured_outputs",
    "thinking_budget",
}
"""Parameters that no single body field of the same name determines."""

_SAME_NAMES = tuple(field.name for field in fields(SamplingParams) if field.name not in _COMPUTED)

if _missing := set(_SAME_NAMES) - SamplingFields.model_fields.keys():
    raise TypeError(f"request bodies lack the sampling parameters {sorted(_missing)}")

_WRITERS: dict[str, Callable[[Any], object]] = {
    "seed": lambda seed: seed if seed < _SIGN else seed - _MASK - 1,
    "structured_outputs": _form_body,
    "repetition_detection": asdict,
}
"""Functions that convert parameters to values of body fields, for objects and signed numbers."""

WRITTEN_NAMES = (
    *_SAME_NAMES,
    *("max_tokens", "logprobs", "prompt_logprobs", "structured_outputs", "logit_bias"),
)
"""The body fields that `written_parameters` returns, without `bad_words` and the reasoning
budget.
"""
