"""The best of several answers to a prompt, by the log-probability of their tokens."""

from collections.abc import Sequence

from services.gateway.core.request.generation import Answer
from services.gateway.core.request.request import ClientRequest


def best_answers(answers: Sequence[Answer], request: ClientRequest) -> list[Answer]:
    """The answers that are returned: `n` to each prompt, of the `best_of` that were generated.

    The best comes first: as OpenAI defines it, the one whose tokens have the highest mean
    log-probability, and of equal ones the one that was generated first. Log-probabilities that the
    client did not ask for are dropped.
    """
    if not request.is_ranked:
        return list(answers)
    returned: list[Answer] = []
    for first in range(0, len(answers), request.num_candidates):
        candidates = answers[first : first + request.num_candidates]
        returned += sorted(candidates, key=_mean_logprob, reverse=True)[: request.n]
    if request.sampling.logprobs is None:
        for answer in returned:
            answer.logprobs = None
    return returned


def _mean_logprob(answer: Answer) -> float:
    """Per token; an answer without tokens is the worst."""
    rows = answer.logprobs
    if rows is None or not len(rows):
        return float("-inf")
    return sum(rows.logprobs[:: rows.width]) / len(rows)
