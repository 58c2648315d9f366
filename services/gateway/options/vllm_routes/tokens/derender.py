"""/derender: converts answers of /inference/v1/generate to text or chat completions."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import InvalidArgument, StepwellError
from services.common.request.finish import Finish, FinishReason
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody, CompletionBody
from services.gateway.adapters.http.openai.chat import ChatDialect, chat_request
from services.gateway.adapters.http.openai.completions import CompletionDialect, completion_request
from services.gateway.adapters.http.openai.sampling import client_request
from services.gateway.core.request.choice import Choice
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import ClientRequest, Prompt, to_engine_requests
from services.gateway.core.text.stop_strings import StopPatterns
from services.gateway.options.vllm_routes.tokens.derender_bodies import (
    DerenderChatBody,
    DerenderCompletionBody,
    GeneratedTokensBody,
    TokensChoiceBody,
)
from services.gateway.options.vllm_routes.tokens.render import check_renders


@dataclass(frozen=True, slots=True)
class _Read:
    """Answers that were converted from tokens to text, and their token counts."""

    answers: Sequence[Answer]
    usage: Usage


async def derendered_chat(body: DerenderChatBody, inference: Inference) -> dict[str, Any]:
    """Converts generated tokens to a chat completion. The tools and the reasoning format of the
    body's chat request determine how the text is parsed. Raises InvalidArgument if the body is
    invalid.
    """
    given = body.generate_response
    choices = given.choices
    _check_size([given], inference)
    asked = body.chat_request or ChatCompletionBody.model_construct()
    if body.chat_request is None:
        request = _plain(asked, given.request_id, [Prompt([])])
    else:
        try:
            check_renders(asked)
            request = await chat_request(asked, inference, given.request_id)
        except StepwellError as error:
            raise _within("chat_request", asked.in_client_words(error)) from error
    token_ids = body.prompt_token_ids or given.prompt_token_ids or request.prompts[0].token_ids
    request = replace(request, prompts=(Prompt(token_ids),), n=len(choices), best_of=None)
    num_prompt = len(token_ids) if body.prompt_tokens is None else body.prompt_tokens
    read = await _read(request, choices, num_prompt, inference)
    name = body.model or asked.model or inference.model_name
    converted = ConvertedRequest(asked, request, time.time_ns(), name, inference.tokenizer)
    return ChatDialect(converted).whole(read.answers, read.usage)


async def derendered_completion(
    body: DerenderCompletionBody, inference: Inference
) -> dict[str, Any]:
    """Converts generated tokens to a text completion. The body has one answer of
    /inference/v1/generate for each prompt. Raises InvalidArgument if the body is invalid.
    """
    given = body.generate_responses
    _check_size(given, inference)
    asked = body.completion_request or CompletionBody.model_construct()
    if body.completion_request is None:
        request = _plain(asked, given[0].request_id, [Prompt([])] * len(given))
    else:
        try:
            check_renders(asked)
            request = await completion_request(asked, inference, given[0].request_id)
        except StepwellError as error:
            raise _within("completion_request", asked.in_client_words(error)) from error
    if len(request.prompts) != len(given):
        raise InvalidArgument(
            f"completion_request has {len(request.prompts)} prompts, and generate_responses has "
            f"{len(given)} answers",
            field="generate_responses",
        )
    own = body.prompt_token_ids or [None] * len(given)
    prompts = [
        Prompt(ids or response.prompt_token_ids or prompt.token_ids)
        for ids, response, prompt in zip(own, given, request.prompts, strict=True)
    ]
    each = [prompt for prompt, one in zip(prompts, given, strict=True) for _ in one.choices]
    request = replace(request, prompts=tuple(each), n=1, best_of=None)
    counts = body.prompt_tokens or [len(prompt.token_ids) for prompt in prompts]
    choices = [choice for response in given for choice in response.choices]
    read = await _read(request, choices, sum(counts), inference)
    name = body.model or asked.model or inference.model_name
    converted = ConvertedRequest(asked, request, time.time_ns(), name, inference.tokenizer)
    return CompletionDialect(converted).whole(read.answers, read.usage)


def _plain(
    asked: ChatCompletionBody | CompletionBody, name: str, prompts: Sequence[Prompt]
) -> ClientRequest:
    return client_request(asked, name, tuple(prompts), SamplingParams())


def _check_size(responses: Sequence[GeneratedTokensBody], inference: Inference) -> None:
    choices = [choice for response in responses for choice in response.choices]
    inference.check_num_choices(len(choices), 1)
    inference.texts.check_num_items("token_ids", sum(len(one.token_ids or ()) for one in choices))


def _within(name: str, error: StepwellError) -> StepwellError:
    """Returns an error about the request in the body's field `name`, with the invalid field's path
    in the whole body.
    """
    field = name if error.field is None else f"{name}.{error.field}"
    return type(error)(f"{name}: {error.message}", field=field, reason=error.error_reason)


async def _read(
    request: ClientRequest,
    choices: Sequence[TokensChoiceBody],
    num_prompt_tokens: int,
    inference: Inference,
) -> _Read:
    """Converts the tokens of each choice to the answer with the same index, in a thread."""
    has_rows = any(choice.rows for choice in choices)
    request = replace(request, sampling=replace(request.sampling, logprobs=0 if has_rows else None))
    sequences = to_engine_requests(request, inference.limits(), seed=0, arrival_unix_nanos=0)
    stops = StopPatterns(request.stop)

    def work() -> _Read:
        readers = [
            Choice(index, inference.tokenizer, request, sequence, stops)
            for index, sequence in enumerate(sequences)
        ]
        answers = []
        for reader, choice in zip(readers, choices, strict=True):
            answer = Answer()
            answer.add(reader.accept(_delta(choice)))
            answers.append(answer)
        form = request.output_form
        tells_reasoning = form is not None and form.reasoning is not None
        usage = Usage(
            num_prompt_tokens,
            0,
            sum(reader.num_output_tokens for reader in readers),
            sum(one.num_reasoning_tokens for one in readers) if tells_reasoning else None,
        )
        return _Read(answers, usage)

    return await asyncio.to_thread(work)


def _delta(choice: TokensChoiceBody) -> Delta:
    rows = choice.rows
    stop = choice.stop_reason
    reason = FinishReason(choice.finish_reason or FinishReason.STOP.value)
    return Delta(
        list(choice.token_ids or ()),
        logprobs=LogprobRows.of(
            1 + len(rows[0].top_logprobs),
            (one.token_id for row in rows for one in (row, *row.top_logprobs)),
            (one.logprob for row in rows for one in (row, *row.top_logprobs)),
            (row.rank or 0 for row in rows),
        )
        if rows
        else None,
        finish=Finish(reason, stop_token_id=stop if isinstance(stop, int) else None),
    )
