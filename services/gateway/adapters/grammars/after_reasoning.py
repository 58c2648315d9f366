"""Constrains the part of an answer after its reasoning."""

from services.common.request.structured_outputs import StructuredOutputs, invalid
from services.gateway.adapters.grammars.lark import Lark, make_lark
from services.gateway.core.ports import Tokenizer
from services.gateway.core.text.parsing.reasoning import PromptedReasoning, ReasoningState

_SPACE = r"/[ \n\t]{0,4}/"


async def after_reasoning(
    form: StructuredOutputs, reasoning: PromptedReasoning, tokenizer: Tokenizer
) -> StructuredOutputs:
    """Returns the constraint of a whole answer. The part after the reasoning must match `form`.

    vLLM applies its masks only after the reasoning. Here the grammar has an unconstrained part for
    the reasoning, so that an answer cannot end within it.
    """
    if reasoning.state is ReasoningState.OVER:
        return form
    lark = await make_lark(tokenizer, reasoning_literals(reasoning))
    return lark.text(f"{thought(lark, reasoning)} {wanted_rule(lark, form)}")


def wanted_rule(lark: Lark, form: StructuredOutputs) -> str:
    """Returns a rule for the client's structured-output constraint. Raises InvalidArgument."""
    try:
        return lark.wanted(form)
    except ValueError as error:
        raise invalid(f"grammar: {error}") from error


def reasoning_literals(reasoning: PromptedReasoning | None) -> list[str]:
    """Returns the literals of the rule that `thought` writes."""
    return [] if reasoning is None else [reasoning.form.start, reasoning.form.end]


def thought(lark: Lark, reasoning: PromptedReasoning | None) -> str:
    """Returns a rule for the reasoning before the answer."""
    if reasoning is None or reasoning.state is ReasoningState.OVER:
        return ""
    inside = lark.rule(f"{lark.text_to(reasoning.form.end)} {_SPACE}")
    if reasoning.state is ReasoningState.INSIDE:
        return inside
    opened = lark.literal(reasoning.form.start)
    return lark.rule(f"(({_SPACE} {opened}) {inside})?")
