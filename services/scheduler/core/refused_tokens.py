"""Requests whose grammar refuses a token: they end, with a sentence that names what is at fault."""

from services.common.finish_reason import FinishReason
from services.common.structured_outputs import FIELD
from services.scheduler.core.output import ModelRunnerOutput
from services.scheduler.core.request import Request


def end_if_refused(request: Request, output: ModelRunnerOutput, index: int, num_kept: int) -> None:
    """Ends the request at this index of a step, one of `refused_tokens`, of which so many tokens
    were appended, unless it ended before the refused one.
    """
    first = output.refused_tokens[index]
    if first > num_kept or (first == num_kept and request.finish_reason is not None):
        return
    after = f"after {request.num_output_tokens - num_kept + first} tokens of this answer"
    error = output.grammar_errors.get(index)
    if error is None:
        request.fail(f"{FIELD}: no token conforms {after}", FinishReason.NO_CONFORMING_TOKEN)
    else:
        why = f"cannot be followed {after}: {error}"
        request.fail(f"{FIELD}: {why}", FinishReason.GRAMMAR_ERROR)
