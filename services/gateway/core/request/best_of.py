"""Selects the best of several answers to a prompt by log-probability."""

from collections.abc import Sequence

from services.gateway.core.request.generation import Answer
from services.gateway.core.request.request import ClientRequest


def best_answers(answers: Sequence[Answer], request: ClientRequest) -> list[Answer]:
    """Returns, for each prompt, the best `n` of the `best_of` generated answers, best first.

    As in OpenAI's definition, the best answer has the highest mean log-probability per token. Among
    equals, the answer with the lowest index is better. Log-probabilities are removed if the client
    did not request them.
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
    """Returns the mean log-probability per token. Minus infinity for an answer without tokens."""
    rows = answer.logprobs
    if rows is None or not len(rows):
        return float("-inf")
    return sum(rows.logprobs[:: rows.width]) / len(rows)
