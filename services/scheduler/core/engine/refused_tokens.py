"""Ends requests whose grammar refuses a token, with an error that names the field."""

from services.common.request.finish_reason import FinishReason
from services.common.request.structured_outputs import FIELD
from services.scheduler.core.output import ModelRunnerOutput
from services.scheduler.core.request import Request


def end_if_refused(request: Request, output: ModelRunnerOutput, index: int, num_kept: int) -> None:
    """Ends the request at `index` in a step whose output has a refused token for it. Does nothing
    if the request ended before the refused token. `num_kept` is the number of the step's tokens
    that were appended to the request.
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
