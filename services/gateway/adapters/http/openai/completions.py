"""/v1/completions: converts request bodies to requests, and answers to chunks or whole bodies."""

import asyncio
from itertools import chain
from typing import Any, cast

from services.common.errors import InvalidArgument
from services.common.telemetry import names
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.exchange.json_pieces import listed
from services.gateway.adapters.http.openai.bodies import CompletionBody
from services.gateway.adapters.http.openai.dialect import Dialect, stop_reason
from services.gateway.adapters.http.openai.embeds import read_prompt_embeds
from services.gateway.adapters.http.openai.logprobs import completion_logprobs, echoed_logprobs
from services.gateway.adapters.http.openai.sampling import (
    check_stream_options,
    check_texts,
    client_request,
    sampling_from_body,
)
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.logprobs import LogprobRows, joined
from services.gateway.core.request.request import ClientRequest, Prompt
from services.gateway.core.text.detokenizer import echoed
from services.gateway.core.truncation import Truncation

DEFAULT_MAX_TOKENS = 16


async def completion_request(
    body: CompletionBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Converts a body to a request. Raises InvalidArgument if fields contradict each other."""
    check_stream_options(body)
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise InvalidArgument(
            "best_of above n cannot be streamed, since the best answers are only known at the end",
            field="best_of",
        )
    prompt_only = bool(body.echo) and body.max_tokens == 0
    prompts = await _prompts(body, inference)
    sampling = await sampling_from_body(
        body,
        inference,
        max_tokens=None if prompt_only else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_num_prompt_logprobs(body),
    )
    return client_request(
        body,
        request_id,
        prompts,
        sampling,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        prompt_only=prompt_only,
        best_of=body.best_of,
    )


def _num_prompt_logprobs(body: CompletionBody) -> int | None:
    if not body.echo or body.logprobs is None:
        return body.prompt_logprobs
    if body.prompt_logprobs not in (None, body.logprobs):
        raise InvalidArgument(
            "prompt_logprobs must equal logprobs if echo is true",
            field="prompt_logprobs",
        )
    return body.logprobs


async def _prompts(body: CompletionBody, inference: Inference) -> tuple[Prompt, ...]:
    if body.prompt_embeds is not None:
        return await _embedded_prompts(body.prompt_embeds, body, inference)
    if body.prompt is None:
        raise InvalidArgument("prompt is missing", field="prompt", reason="MISSING_PARAMETER")
    prompts = [body.prompt] if _is_single(body.prompt) else body.prompt
    inference.check_num_choices(len(prompts), body.n or 1, body.best_of)
    if isinstance(prompts[0] if prompts else [], str):
        return await _text_prompts(cast(list[str], prompts), body, inference)
    return await _token_prompts(cast(list[list[int]], prompts), body, inference)


async def _embedded_prompts(
    given: str | list[str], body: CompletionBody, inference: Inference
) -> tuple[Prompt, ...]:
    if body.prompt:
        raise InvalidArgument(
            "prompt and prompt_embeds cannot both be given", field="prompt_embeds"
        )
    if body.echo:
        raise InvalidArgument("echo: prompt_embeds have no text to echo", field="echo")
    if body.truncate_prompt_tokens is not None:
        field = "truncate_prompt_tokens"
        raise InvalidArgument(f"{field}: prompt_embeds cannot be truncated", field=field)
    files = [given] if isinstance(given, str) else given
    inference.check_num_choices(len(files), body.n or 1, body.best_of)
    embedded = [await asyncio.to_thread(read_prompt_embeds, file) for file in files]
    return tuple(Prompt(embeds.placeholders, embeds=embeds) for embeds in embedded)


def _is_single(prompt: str | list[str] | list[int] | list[list[int]]) -> bool:
    return isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)


def _kept(body: CompletionBody, inference: Inference) -> Truncation | None:
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    return inference.texts.truncation(body.truncate_prompt_tokens, body.truncation_side, most)


async def _text_prompts(
    texts: list[str], body: CompletionBody, inference: Inference
) -> tuple[Prompt, ...]:
    check_texts(texts, "prompt")
    with_special = body.add_special_tokens is not False
    kept = _kept(body, inference)
    token_ids = await inference.texts.encode(texts, add_special_tokens=with_special, kept=kept)
    if kept is not None and body.echo:
        return await _token_prompts(token_ids, body, inference)
    if not body.echo:
        return tuple(map(Prompt, token_ids))
    if body.logprobs is None:
        return tuple(map(Prompt, token_ids, texts))
    starts = await inference.tokenizer.token_starts(texts, add_special_tokens=with_special)
    return tuple(map(Prompt, token_ids, texts, starts))


async def _token_prompts(
    prompts: list[list[int]], body: CompletionBody, inference: Inference
) -> tuple[Prompt, ...]:
    if (kept := _kept(body, inference)) is not None:
        prompts = [kept.kept(prompt) for prompt in prompts]
    longest = max(map(len, prompts), default=0)
    if not body.echo or longest >= inference.limits().capacity:  # too long: refused later
        return tuple(map(Prompt, prompts))
    tokenizer = inference.tokenizer
    return tuple([Prompt(ids, *await asyncio.to_thread(echoed, tokenizer, ids)) for ids in prompts])


class CompletionDialect(Dialect):
    """Writes text completions. If `echo` is set, the prompt is sent with the first tokens of each
    answer.
    """

    operation = names.GENAI_OPERATION_TEXT_COMPLETION
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, converted: ConvertedRequest[CompletionBody]) -> None:
        super().__init__(converted)
        self._unsent: dict[int, LogprobRows | None] = dict.fromkeys(range(self.request.num_choices))

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        prompt_rows = None
        is_first = piece.index in self._unsent
        if is_first:
            prompt_rows = joined(self._unsent[piece.index], piece.prompt_logprobs)
            self._unsent[piece.index] = prompt_rows
        if not piece.token_ids and piece.finish_reason is None:
            return []
        says_nothing = not (
            piece.text or piece.logprobs or piece.finish_reason or self.return_token_ids
        )
        if says_nothing and not (is_first and self.request.prompts[0].text is not None):
            return []
        self._unsent.pop(piece.index, None)
        return [self._choice(piece.index, piece, piece, prompt_rows, with_prompt=is_first)]

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        rows = answer.prompt_logprobs
        shaped = self._choice(index, answer, answer.last, rows, with_prompt=True)
        if self.return_prompt_logprobs:
            shaped["prompt_logprobs"] = self.prompt_logprobs(rows)
        return shaped

    def _choice(
        self,
        index: int,
        part: Piece | Answer,
        last: Piece,
        prompt_rows: LogprobRows | None,
        *,
        with_prompt: bool,
    ) -> dict[str, Any]:
        prompt = self.request.prompts[index // self.request.n]
        echo = prompt.text or ""
        rows, logprobs = part.logprobs, None
        num_rows = len(rows or ()) + len(prompt_rows or ())
        if rows is not None:
            shifted = [len(echo) + offset for offset in part.offsets or ()]
            logprobs = completion_logprobs(rows, shifted, self.tokenizer, self.token_text)
        wants_logprobs = self.request.sampling.logprobs is not None
        if with_prompt and prompt.offsets is not None and wants_logprobs:
            before = echoed_logprobs(prompt, prompt_rows, self.tokenizer, self.token_text)
            if logprobs is not None:
                before = {name: chain(before[name], logprobs[name]) for name in before}
            logprobs = before
        shaped = {
            "index": index,
            "text": echo + part.text if with_prompt else part.text,
            "logprobs": None
            if logprobs is None
            else {name: listed(items, num_rows) for name, items in logprobs.items()},
            "finish_reason": last.finish_reason.value if last.finish_reason else None,
            "stop_reason": stop_reason(last),
        }
        if self.return_token_ids:
            shaped["token_ids"] = listed(part.token_ids, len(part.token_ids))
            shaped["prompt_token_ids"] = (
                listed(prompt.token_ids, len(prompt.token_ids)) if with_prompt else None
            )
        return shaped
