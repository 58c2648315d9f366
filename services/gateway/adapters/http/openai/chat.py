"""/v1/chat/completions: converts request bodies to requests, and answers to chunks or whole
bodies.
"""

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidArgument
from services.common.telemetry import names
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.exchange.json_pieces import LongList, listed
from services.gateway.adapters.http.openai.bodies import ChatCompletionBody, Effort, TokenizeBody
from services.gateway.adapters.http.openai.chat_messages import MessageWriter
from services.gateway.adapters.http.openai.dialect import Dialect, stop_reason
from services.gateway.adapters.http.openai.logprobs import chat_logprobs
from services.gateway.adapters.http.openai.output_plan import AUTO, NONE, ToolUse, planned
from services.gateway.adapters.http.openai.rendering import render_turns
from services.gateway.adapters.http.openai.sampling import (
    check_stream_options,
    client_request,
    sampling_from_body,
)
from services.gateway.adapters.http.openai.tool_bodies import CHAT_TOOLS, check_tools
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import ClientRequest, Prompt


async def chat_request(
    body: ChatCompletionBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Converts a body to a request. Raises InvalidArgument if fields contradict each other."""
    check_stream_options(body)
    use = tool_use(body)
    use.check(inference)
    text = await render(body, inference)
    kept = inference.texts.truncation(
        body.truncate_prompt_tokens, body.truncation_side, _max_tokens(body)
    )
    [token_ids] = await inference.texts.encode(
        [text], add_special_tokens=bool(body.add_special_tokens), kept=kept
    )
    sampling = await sampling_from_body(
        body,
        inference,
        max_tokens=_max_tokens(body),
        logprobs=_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
    request = client_request(body, request_id, (Prompt(token_ids),), sampling)
    last = body.messages[-1] if body.continue_final_message else None
    last_turn = None if last is None else last.to_template("messages[-1]")
    return await planned(request, use, text, inference, last_turn, body.thinking_token_budget)


def tool_use(body: ChatCompletionBody) -> ToolUse:
    tools = body.tools or []
    choice = body.tool_choice or AUTO
    if choice == AUTO and not tools:
        choice = NONE
    return ToolUse(
        tools=[tool.function.callable for tool in tools],
        choice=choice if isinstance(choice, str) else NONE,
        named=None if isinstance(choice, str) else choice.function.name,
        parallel=body.parallel_tool_calls is not False,
    )


async def render(body: ChatCompletionBody | TokenizeBody, inference: Inference) -> str:
    """Renders the conversation to a prompt. Raises InvalidArgument for contradictory options or
    invalid tools.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt exclude each other",
            field="continue_final_message",
        )
    check_tools([tool.function.callable for tool in body.tools or ()], CHAT_TOOLS)
    messages = [
        message.to_template(f"messages[{number}]")
        for number, message in enumerate(body.messages or ())
    ]
    effort = body.reasoning_effort if isinstance(body, ChatCompletionBody) else None
    return await render_turns(
        inference.tokenizer,
        messages,
        tools=[tool.function.to_template() for tool in body.tools or ()],
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables={**effort_variables(effort), **(body.chat_template_kwargs or {})},
    )


def effort_variables(effort: Effort | None) -> dict[str, Any]:
    """Returns the template variables that vLLM sets for this reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


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
    """Writes answers of chat completions, whole or in chunks. Each choice is one message."""

    operation = names.GENAI_OPERATION_CHAT
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, converted: ConvertedRequest[ChatCompletionBody]) -> None:
        super().__init__(converted)
        shows_reasoning = converted.body.include_reasoning is not False
        self._messages = MessageWriter(
            converted.request, converted.arrival_unix_nanos, shows_reasoning=shows_reasoning
        )

    def opening(self, _usage: Usage) -> list[dict[str, Any]]:
        choices = []
        for index in range(self.request.num_choices):
            choice = self._chunk(index, {"role": "assistant", "content": ""})
            if self.return_token_ids:
                choice["prompt_token_ids"] = self._prompt_token_ids()
            choices.append(choice)
        return choices

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        has_tokens = piece.logprobs or (self.return_token_ids and piece.token_ids)
        deltas = self._messages.deltas(piece)
        if has_tokens and not deltas:
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            chunk = self._chunk(piece.index, delta)
            if number == 0:
                chunk["logprobs"] = self._logprobs(piece.logprobs)
                if self.return_token_ids:
                    chunk["token_ids"] = piece.token_ids
            chunks.append(chunk)
        if piece.finish_reason is not None:
            chunk = self._chunk(piece.index, {})
            chunk["finish_reason"] = self._messages.finish_reason(piece)
            chunk["stop_reason"] = stop_reason(piece)
            chunks.append(chunk)
        return chunks

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        last = answer.last
        shaped = {
            "index": index,
            "message": self._messages.whole(index, answer),
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": self._messages.finish_reason(
                last, num_calls=len(answer.message.calls)
            ),
            "stop_reason": stop_reason(last),
        }
        if self.return_token_ids:
            shaped["token_ids"] = listed(answer.token_ids, len(answer.token_ids))
        return shaped

    def extras(self, answers: Sequence[Answer]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.return_token_ids:
            extras["prompt_token_ids"] = self._prompt_token_ids()
        if self.return_prompt_logprobs:
            extras["prompt_logprobs"] = self.prompt_logprobs(answers[0].prompt_logprobs)
        return extras

    def _prompt_token_ids(self) -> list[int] | LongList:
        token_ids = self.request.prompts[0].token_ids
        return listed(token_ids, len(token_ids))

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, rows: LogprobRows | None) -> dict[str, Any] | None:
        if rows is None:
            return None
        return {
            "content": listed(chat_logprobs(rows, self.tokenizer, self.token_text), len(rows)),
            "refusal": None,
        }
