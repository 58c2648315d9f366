"""/v1/responses: converts a body to a request."""

from dataclasses import replace

from services.common.request.structured_outputs import StructuredOutputs
from services.gateway.adapters.http.openai.chat import effort_variables
from services.gateway.adapters.http.openai.formats import ANY_OBJECT, JsonObjectFormat, json_form
from services.gateway.adapters.http.openai.output_plan import AUTO, NONE, ToolUse, planned
from services.gateway.adapters.http.openai.rendering import render_turns
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.adapters.http.openai.responses.items import turns_of
from services.gateway.adapters.http.openai.sampling import given_parameters
from services.gateway.adapters.http.openai.tool_bodies import ToolFields, check_tools
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest, Prompt


async def responses_request(
    body: ResponsesBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Converts a body to a request. Raises InvalidArgument if fields contradict each other."""
    use = _tool_use(body)
    use.check(inference)
    text = await _render(body, inference)
    [token_ids] = await inference.texts.encode([text], add_special_tokens=False)
    request = ClientRequest(
        request_id=request_id,
        prompts=(Prompt(token_ids),),
        sampling=replace(
            inference.default_sampling,
            max_tokens=body.max_output_tokens,
            structured_outputs=_form(body),
            **given_parameters(body),
        ),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        skip_reading_prefix_cache=bool(body.skip_reading_prefix_cache),
        session_id=body.prompt_cache_key or "",
    )
    return await planned(request, use, text, inference)


async def _render(body: ResponsesBody, inference: Inference) -> str:
    tools = body.functions
    check_tools([tool.callable for tool in tools], _fields(body))
    turns = [{"role": "user", "content": body.input}]
    if not isinstance(body.input, str):
        turns = turns_of(body.input)
    if body.instructions is not None:
        turns.insert(0, {"role": "system", "content": body.instructions})
    effort = None if body.reasoning is None else body.reasoning.effort
    return await render_turns(
        inference.tokenizer,
        turns,
        tools=[tool.to_template() for tool in tools],
        add_generation_prompt=True,
        continue_final_message=False,
        variables={**effort_variables(effort), **(body.chat_template_kwargs or {})},
    )


def _tool_use(body: ResponsesBody) -> ToolUse:
    tools = body.functions
    choice = body.tool_choice or AUTO
    if choice == AUTO and not tools:
        choice = NONE
    return ToolUse(
        tools=[tool.callable for tool in tools],
        choice=choice if isinstance(choice, str) else NONE,
        named=None if isinstance(choice, str) else body.whole_name(choice.name),
        parallel=body.parallel_tool_calls is not False,
        fields=_fields(body),
    )


def _fields(body: ResponsesBody) -> ToolFields:
    paths = "tools{}.name", "tools{}.parameters", "tools{}.strict"
    return ToolFields(*paths, places=list(body.places))


def _form(body: ResponsesBody) -> StructuredOutputs | None:
    if body.form is None:
        return None
    if isinstance(body.form, JsonObjectFormat):
        return json_form(ANY_OBJECT)
    return json_form(body.form.schema_)
