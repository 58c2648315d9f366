"""/v1/chat/completions: from its body to a request, from answers to its chunks."""

import re
from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidArgument, StepwellError
from services.gateway.adapters.http.bodies import ChatCompletionBody, ChatPrompt, TokenizeBody
from services.gateway.adapters.http.dialect import Dialect, stop_reason
from services.gateway.adapters.http.json_pieces import LongList, listed
from services.gateway.adapters.http.logprobs import chat_logprobs, prompt_logprobs
from services.gateway.adapters.http.sampling import (
    check_stream_options,
    sampling_from_body,
    stop_strings,
)
from services.gateway.core.choice import Piece
from services.gateway.core.generation import Answer
from services.gateway.core.inference import Inference
from services.gateway.core.logprobs import LogprobRows
from services.gateway.core.request import ClientRequest, Prompt

# What a template is given by the server cannot be given by a client.
_RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        "sanitize_control_tokens",
        "chat_template",
        "tools",
        "documents",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "add_generation_prompt",
        "continue_final_message",
    }
)


async def chat_request(
    body: ChatCompletionBody, inference: Inference, request_id: str
) -> ClientRequest:
    """The request that a body asks for. Raises InvalidArgument for contradictions."""
    check_stream_options(body)
    text = await render(body, inference)
    [token_ids] = await inference.encode([text], add_special_tokens=bool(body.add_special_tokens))
    return ClientRequest(
        request_id=request_id,
        prompts=(Prompt(token_ids),),
        sampling=await sampling_from_body(
            body,
            inference,
            max_tokens=_max_tokens(body),
            logprobs=_num_logprobs(body),
            prompt_logprobs=body.prompt_logprobs,
        ),
        n=1 if body.n is None else body.n,
        stop=stop_strings(body),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


async def render(body: ChatPrompt | TokenizeBody, inference: Inference) -> str:
    """The conversation as the model reads it."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt exclude each other",
            field="continue_final_message",
        )
    variables = body.chat_template_kwargs or {}
    reserved = _RESERVED_VARIABLES & variables.keys()
    if reserved:
        raise InvalidArgument(
            f"chat_template_kwargs may not hold {min(reserved)!r}", field="chat_template_kwargs"
        )
    messages = [message.to_template() for message in body.messages or ()]
    return await inference.tokenizer.render_chat(
        messages,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=variables,
    )


def in_chat_words(error: StepwellError, body: ChatCompletionBody) -> StepwellError:
    """An error with its field named as in a chat body."""
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    name = names.get(error.field or "")
    if name is None:
        return error
    return type(error)(
        re.sub(rf"\b{error.field}\b", name, error.message, count=1),
        field=name,
        reason=error.error_reason,
        retry_after_seconds=error.retry_after_seconds,
    )


def _max_tokens(body: ChatCompletionBody) -> int | None:
    both = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(both) > 1:
        raise InvalidArgument(
            f"max_tokens is {body.max_tokens} but max_completion_tokens is "
            f"{body.max_completion_tokens}: they mean the same",
            field="max_completion_tokens",
        )
    return both.pop() if both else None


def _num_logprobs(body: ChatCompletionBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidArgument(
            "top_logprobs may only be given with logprobs=true", field="top_logprobs"
        )
    return None


class ChatDialect(Dialect):
    """Chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        choices = []
        for index in range(self.request.num_choices):
            choice = self._chunk(index, {"role": "assistant", "content": ""})
            if self.envelope.return_token_ids:
                choice["prompt_token_ids"] = self._prompt_token_ids()
            choices.append(choice)
        return choices

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        has_tokens = piece.logprobs or (self.envelope.return_token_ids and piece.token_ids)
        if piece.text or has_tokens:
            chunk = self._chunk(piece.index, {"content": piece.text})
            chunk["logprobs"] = self._logprobs(piece.logprobs)
            if self.envelope.return_token_ids:
                chunk["token_ids"] = piece.token_ids
            chunks.append(chunk)
        if piece.finish_reason is not None:
            chunk = self._chunk(piece.index, {})
            chunk["finish_reason"] = piece.finish_reason.value
            chunk["stop_reason"] = stop_reason(piece)
            chunks.append(chunk)
        return chunks

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        last = answer.last
        shaped = {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": last.finish_reason.value if last.finish_reason else None,
            "stop_reason": stop_reason(last),
        }
        if self.envelope.return_token_ids:
            shaped["token_ids"] = listed(answer.token_ids, len(answer.token_ids))
        return shaped

    def extras(self, answers: Sequence[Answer]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.envelope.return_token_ids:
            extras["prompt_token_ids"] = self._prompt_token_ids()
        if self.envelope.return_prompt_logprobs:
            rows = answers[0].prompt_logprobs
            extras["prompt_logprobs"] = listed(
                prompt_logprobs(rows, self.tokens), 1 + len(rows or ())
            )
        return extras

    def _prompt_token_ids(self) -> list[int] | LongList:
        token_ids = self.request.prompts[0].token_ids
        return listed(token_ids, len(token_ids))

    def _chunk(self, index: int, delta: dict[str, str]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, rows: LogprobRows | None) -> dict[str, Any] | None:
        if rows is None:
            return None
        return {"content": listed(chat_logprobs(rows, self.tokens), len(rows)), "refusal": None}
