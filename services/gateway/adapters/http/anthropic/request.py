"""/v1/messages: converts a body to a request."""

from dataclasses import replace
from typing import Any

from services.common.errors import InvalidArgument
from services.common.request.structured_outputs import StructuredOutputs
from services.gateway.adapters.http.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.adapters.http.openai.content_parts import said
from services.gateway.adapters.http.openai.formats import json_form
from services.gateway.adapters.http.openai.output_plan import AUTO, NONE, REQUIRED, ToolUse, planned
from services.gateway.adapters.http.openai.rendering import render_turns
from services.gateway.adapters.http.openai.sampling import given_parameters
from services.gateway.adapters.http.openai.tool_bodies import ToolFields, check_tools
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest, Prompt

_TOOLS = ToolFields("tools{}.name", "tools{}.input_schema", "tools{}.strict")
_BILLING = "x-anthropic-billing-header"
"""The beginning of the first block of Claude Code's system prompt. The block is removed, because it
contains a hash that differs in each request and would prevent prefix cache hits.
"""
_CHOICES = {"auto": AUTO, "any": REQUIRED, "tool": NONE, "none": NONE}


async def messages_request(
    body: MessagesBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Converts a body to a request. Raises InvalidArgument if fields contradict each other, such as
    a required tool call without tools, or if a field is invalid or unsupported.

    As in Anthropic's API, `max_tokens` may exceed the context length. The answer then ends when the
    context is full.
    """
    if body.thread is not None:
        raise InvalidArgument(
            "thread: conversations are not kept here; send the whole conversation",
            field="thread",
            reason="THREAD_UNSUPPORTED_REQUEST",
        )
    use = _tool_use(body)
    use.check(inference)
    text = await render(body, inference)
    [token_ids] = await inference.texts.encode([text], add_special_tokens=False)
    request = ClientRequest(
        request_id=request_id,
        prompts=(Prompt(token_ids),),
        sampling=replace(
            inference.default_sampling, structured_outputs=_form(body), **given_parameters(body)
        ),
        stop=tuple(body.stop_sequences or ()),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        skip_reading_prefix_cache=bool(body.skip_reading_prefix_cache),
        default_max_tokens=body.max_tokens,
    )
    last = body.messages[-1]
    turns = list(last.to_template("messages[-1]")) if last.role == "assistant" else [None]
    return await planned(request, use, text, inference, turns[-1], _budget(body, inference))


async def render(body: CountTokensBody, inference: Inference) -> str:
    """Renders the prompt. If its last turn is the assistant's, the answer continues that turn."""
    tools = body.tools or []
    check_tools([tool.callable for tool in tools], _TOOLS)
    system = [text for text in said(body.system) if not text.startswith(_BILLING)]
    turns = [{"role": "system", "content": system}] if any(system) else []
    for number, message in enumerate(body.messages):
        turns += message.to_template(f"messages[{number}]")
    continues = turns[-1]["role"] == "assistant"
    if continues and "tool_calls" in turns[-1]:
        raise InvalidArgument(
            "messages: the results of the last calls are missing", field="messages"
        )
    return await render_turns(
        inference.tokenizer,
        turns,
        tools=[tool.to_template() for tool in tools],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables={**_thinking(body), **(body.chat_template_kwargs or {})},
    )


def _tool_use(body: MessagesBody) -> ToolUse:
    choice, tools = body.tool_choice, body.tools or []
    if choice is None:
        return ToolUse([tool.callable for tool in tools], AUTO if tools else NONE, fields=_TOOLS)
    if choice.type in ("any", "tool") and not tools:
        raise InvalidArgument(
            f"tool_choice is {choice.type}, but there are no tools", field="tool_choice"
        )
    return ToolUse(
        tools=[tool.callable for tool in tools],
        choice=_CHOICES[choice.type] if tools else NONE,
        named=choice.name,
        parallel=not choice.disable_parallel_tool_use,
        fields=_TOOLS,
    )


def _thinking(body: CountTokensBody) -> dict[str, Any]:
    effort = None if body.output_config is None else body.output_config.effort
    thinking = "adaptive" if body.thinking is None else body.thinking.type
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinking != "adaptive":
        variables["enable_thinking"] = thinking == "enabled"
    return variables


def _budget(body: MessagesBody, inference: Inference) -> int | None:
    """Returns the maximum number of thinking tokens. Returns None if the client sets none, or if
    the server has no parser of the model's reasoning.
    """
    if body.thinking is None or body.thinking.type != "enabled":
        return None
    return None if inference.output_formats.reasoning is None else body.thinking.budget_tokens


def _form(body: MessagesBody) -> StructuredOutputs | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    return json_form(body.output_config.format.schema_)
