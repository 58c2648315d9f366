"""A demanded form, held to from where reasoning ends."""

from services.common.structured_outputs import StructuredOutputs, invalid
from services.gateway.adapters.grammars.lark import Lark, make_lark
from services.gateway.core.parsing.reasoning import ReasoningFormat
from services.gateway.core.ports import Tokenizer

_SPACE = r"/[ \n\t]{0,4}/"


async def after_reasoning(
    form: StructuredOutputs, reasoning: ReasoningFormat, prompt: str, tokenizer: Tokenizer
) -> StructuredOutputs:
    """What an answer to this prompt conforms to, whose part after the reasoning has a form.

    vLLM starts its masks where the reasoning ends; here the grammar has a free part, which also
    keeps an answer from ending within it.
    """
    if reasoning.is_over(prompt):
        return form
    lark = await make_lark(tokenizer, [reasoning.start, reasoning.end])
    return lark.text(f"{thought(lark, reasoning, prompt)} {wanted_rule(lark, form)}")


def wanted_rule(lark: Lark, form: StructuredOutputs) -> str:
    """The form that a client demands, as a rule. Raises InvalidArgument."""
    try:
        return lark.wanted(form)
    except ValueError as error:
        raise invalid(f"grammar: {error}") from error


def thought(lark: Lark, reasoning: ReasoningFormat | None, prompt: str) -> str:
    """The reasoning that comes before the answer to this prompt, as a rule; empty for none."""
    if reasoning is None or reasoning.is_over(prompt):
        return ""
    inside = lark.rule(f"{lark.text_to(reasoning.end)} {_SPACE}")
    if reasoning.begins_inside(prompt):
        return inside
    opened = lark.literal(reasoning.start)
    return lark.rule(f"(({_SPACE} {opened}) {inside})?")
