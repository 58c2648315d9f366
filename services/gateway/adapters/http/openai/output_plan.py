"""Decides how answers are constrained and parsed. The decision depends on the tools, the required
schema, and the reasoning format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import InvalidArgument
from services.common.request.structured_outputs import StructuredOutputs
from services.common.request.thinking_budget import MAX_TOKENS, ThinkingBudget
from services.gateway.adapters.grammars import tool_calls
from services.gateway.adapters.grammars.lark import after_reasoning
from services.gateway.adapters.grammars.refused import check_schemas, check_written
from services.gateway.adapters.http.openai.formats import json_form
from services.gateway.adapters.http.openai.tool_bodies import CHAT_TOOLS, ToolFields
from services.gateway.core.ports import Tokenizer
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest
from services.gateway.core.text.parsing.formats.harmony import HARMONY_MARKS, open_message
from services.gateway.core.text.parsing.output_form import OutputForm
from services.gateway.core.text.parsing.reasoning import PromptedReasoning, ReasoningState

_BUDGET = "thinking_token_budget"
_NO_BUDGET = -1
NONE, AUTO, REQUIRED = "none", "auto", "required"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and whether the model must not (`choice` is none), may (auto) or must
    (required) call one. If `named` is set, the model must call this tool, and `choice` is ignored.
    """

    tools: Sequence[tool_calls.CallableTool] = ()
    choice: str = NONE
    named: str | None = None
    parallel: bool = True
    fields: ToolFields = CHAT_TOOLS

    def check(self, inference: Inference) -> None:
        """Raises InvalidArgument if the choice contradicts the tools, or if the server does not
        support it.
        """
        if self.named is not None:
            if self.named not in {tool.name for tool in self.tools}:
                raise InvalidArgument(
                    f"tool_choice names the tool {self.named[:100]!r}, which is not in tools",
                    field="tool_choice",
                )
        elif self.choice != NONE and not self.tools:
            raise InvalidArgument(
                f"tool_choice is {self.choice}, but there are no tools", field="tool_choice"
            )
        elif self.choice == AUTO:
            formats = inference.output_formats
            if formats.tools is None or not formats.auto_tools:
                raise InvalidArgument(
                    "tool_choice auto, the default where there are tools, needs a server that was "
                    "started with --enable-auto-tool-choice and --tool-call-parser; none, and a "
                    "choice that forces calls, need neither",
                    field="tool_choice",
                )

    @property
    def is_forced(self) -> bool:
        return self.named is not None or self.choice == REQUIRED

    @property
    def held_tools(self) -> dict[str, tool_calls.CallableTool]:
        """The tools whose arguments must conform to their schemas. The keys are the paths of the
        schemas in the body, for errors.
        """
        return {
            self.fields.of(self.fields.schema, number): tool
            for number, tool in enumerate(self.tools)
            if (tool.name == self.named if self.named is not None else self._holds(tool))
        }

    def _holds(self, tool: tool_calls.CallableTool) -> bool:
        return self.choice == REQUIRED or (self.choice == AUTO and tool.strict)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The constraint on the answers, and the format by which they are parsed. `marks` are the texts
    that delimit the parts of an answer in the format. They may be special tokens.
    """

    structured_outputs: StructuredOutputs | None
    output_form: OutputForm | None
    marks: tuple[str, ...]


async def planned(
    request: ClientRequest,
    use: ToolUse,
    prompt: str,
    inference: Inference,
    last_turn: Mapping[str, Any] | None = None,
    thinking_token_budget: int | None = None,
) -> ClientRequest:
    """Returns the request with the constraint on its answers and the format by which they are
    parsed. `prompt` is the rendered text of the request's prompt. `last_turn` is the assistant's
    turn that the answer continues. `thinking_token_budget` is the maximum number of reasoning
    tokens, or -1 for no maximum. Raises InvalidArgument if the tools or the constraint are invalid.
    """
    sampling = request.sampling
    reasoning = _reasoning(request, prompt, inference, last_turn)
    if thinking_token_budget not in (None, _NO_BUDGET):
        budget = await _budget(thinking_token_budget or 0, reasoning, inference)
        sampling = replace(sampling, thinking_budget=budget)
    plan = await _plan(use, sampling.structured_outputs, prompt, reasoning, inference)
    if plan.structured_outputs is not sampling.structured_outputs:
        sampling = replace(sampling, structured_outputs=plan.structured_outputs)
    return replace(
        request,
        sampling=sampling,
        output_form=plan.output_form,
        shown_special_ids=inference.special_tokens.marks(plan.marks),
    )


async def _budget(
    num_tokens: int, reasoning: PromptedReasoning | None, inference: Inference
) -> ThinkingBudget | None:
    """Returns the bound on the number of reasoning tokens. Returns None if the prompt already ends
    the reasoning.
    """
    if reasoning is None:
        raise InvalidArgument(
            f"{_BUDGET} is not supported by a server without --reasoning-parser",
            field=_BUDGET,
            reason="UNSUPPORTED_PARAMETER",
        )
    if not 0 <= num_tokens <= MAX_TOKENS:
        raise InvalidArgument(
            f"{_BUDGET} must be from 0 to {MAX_TOKENS}, or -1 for no bound, not {num_tokens}",
            field=_BUDGET,
        )
    if reasoning.state is ReasoningState.OVER:
        return None
    form = reasoning.form
    start, end = await inference.texts.encode([form.start, form.end], add_special_tokens=False)
    begins_inside = reasoning.state is ReasoningState.INSIDE
    return ThinkingBudget(num_tokens, tuple(start), tuple(end), begins_inside)


def _reasoning(
    request: ClientRequest, prompt: str, inference: Inference, last_turn: Mapping[str, Any] | None
) -> PromptedReasoning | None:
    """Returns the reasoning format, with the state of the reasoning at the prompt's end, or None if
    the server has no reasoning parser. If the answer continues a turn with reasoning and content,
    the reasoning is over, even if the template omits it from the prompt.
    """
    form = inference.output_formats.reasoning
    if form is None:
        return None
    token_ids = request.prompts[0].token_ids
    turn = inference.special_tokens.open_turn(prompt, token_ids, form.marks)
    state = form.state_after(prompt, turn)
    if last_turn and last_turn.get("reasoning_content") and any(last_turn["content"]):
        state = ReasoningState.OVER
    return PromptedReasoning(form, state)


async def _plan(
    use: ToolUse,
    wanted: StructuredOutputs | None,
    prompt: str,
    reasoning: PromptedReasoning | None,
    inference: Inference,
) -> OutputPlan:
    """Returns the plan for the answers to a rendered prompt. `wanted` is the constraint on the
    answers' content. Raises InvalidArgument if the tools or `wanted` are invalid.

    As in vLLM, `wanted` does not apply if a call is forced, and constraints apply only to the text
    after the reasoning. If `wanted` is set and the model may call tools, an answer is either calls
    or content that conforms to `wanted`. If `wanted` is set and the tool format has no envelope
    (marks at the start and end of a call), the model cannot call tools.
    """
    use.check(inference)
    formats = inference.output_formats
    grammar = await _grammar(use, wanted, reasoning, inference)
    unserved: tuple[str, ...] = ()
    if grammar is None and use.choice == AUTO and any(tool.strict for tool in use.tools):
        unserved = (use.fields.strict.replace("{}", ""),)
    envelope = None if formats.tools is None else formats.tools.envelope
    calls_freely = use.choice == AUTO and (wanted is None or envelope is not None)
    if not (use.is_forced or calls_freely or reasoning or formats.is_harmony):
        return OutputPlan(grammar, None, ())
    is_harmony = formats.is_harmony and grammar is None
    tools = formats.tools if calls_freely else None
    form = OutputForm(
        tools=tools,
        schemas={tool.name: tool.schema for tool in use.tools} if calls_freely else {},
        is_call_list=use.is_forced and use.named is None,
        named=use.named,
        reasoning=formats.reasoning,
        begins_in_reasoning=reasoning is not None and reasoning.state is ReasoningState.INSIDE,
        is_harmony=is_harmony,
        open_message=open_message(prompt) if is_harmony else "",
        single_call=not use.parallel,
        unserved_fields=unserved,
    )
    marks = () if reasoning is None else reasoning.form.marks
    marks += () if tools is None else tools.marks
    return OutputPlan(grammar, form, marks + (HARMONY_MARKS if is_harmony else ()))


async def _grammar(
    use: ToolUse,
    wanted: StructuredOutputs | None,
    reasoning: PromptedReasoning | None,
    inference: Inference,
) -> StructuredOutputs | None:
    """Returns the constraint on the whole answer, or None if it is unconstrained. Raises
    InvalidArgument, with the field of a tool's schema if the schema is the cause. In a tool format
    without an envelope, the arguments of calls are not constrained.
    """
    tokenizer, tools = inference.tokenizer, use.held_tools
    formats = inference.output_formats.tools
    envelope = None if formats is None else formats.envelope
    check_schemas(tools)
    grammar: StructuredOutputs | None
    if use.named is not None:
        [named] = tools.values()
        grammar = await _after(json_form(tool_calls.bare(named.schema)), reasoning, tokenizer)
    elif use.choice == REQUIRED:
        grammar = await tool_calls.forced_calls(
            use.tools, tokenizer, reasoning, parallel=use.parallel
        )
    elif wanted is not None and use.choice == AUTO and envelope is not None:
        grammar = await tool_calls.calls_or_form(
            use.tools, envelope, wanted, tokenizer, reasoning, parallel=use.parallel
        )
    elif wanted is not None:
        grammar = await _after(wanted, reasoning, tokenizer)
    elif tools and envelope is not None:
        grammar = await tool_calls.strict_calls(
            use.tools, envelope, tokenizer, reasoning, parallel=use.parallel
        )
    else:
        grammar = None
    if grammar is not None and grammar is not wanted:
        await check_written(grammar, tools, None if use.is_forced else wanted, inference.check_form)
    return grammar


async def _after(
    form: StructuredOutputs, reasoning: PromptedReasoning | None, tokenizer: Tokenizer
) -> StructuredOutputs:
    return form if reasoning is None else await after_reasoning(form, reasoning, tokenizer)
