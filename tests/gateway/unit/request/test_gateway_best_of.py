"""With `best_of`, the best of several answers are those with the highest mean log-probability."""

from services.common.request.sampling import SamplingParams
from services.gateway.core.request.generation import Answer, best_answers
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import ClientRequest, Prompt


def answer(*logprobs: float) -> Answer:
    """An answer whose tokens have these log-probabilities. Each row also has the best token."""
    token_ids = [token for index in range(len(logprobs)) for token in (index, 9)]
    rows = [value for logprob in logprobs for value in (logprob, 0.0)]
    return Answer(logprobs=LogprobRows.of(2, token_ids, rows, [2] * len(logprobs)))


def request(n: int, best_of: int | None, *, num_prompts: int = 1) -> ClientRequest:
    prompts = tuple(Prompt([5]) for _ in range(num_prompts))
    return ClientRequest("name", prompts, SamplingParams(logprobs=1), n=n, best_of=best_of)


def test_the_mean_decides_and_not_the_sum() -> None:
    long, short = answer(-1.0, -1.0, -1.0), answer(-2.0)
    assert best_answers([short, long], request(1, 2)) == [long]


def test_the_best_of_each_prompt_come_first_and_equal_ones_in_their_order() -> None:
    worst, same, again, best = answer(-3.0), answer(-2.0), answer(-2.0), answer(-1.0)
    candidates = [worst, same, again, best]
    returned = best_answers([*candidates, *reversed(candidates)], request(3, 4, num_prompts=2))
    expected = [best, same, again, best, again, same]
    assert [id(each) for each in returned] == [id(each) for each in expected]


def test_an_answer_without_tokens_is_the_worst() -> None:
    empty, improbable = Answer(), answer(-9999.0)
    assert best_answers([empty, improbable], request(1, 2)) == [improbable]


def test_all_are_returned_in_their_order_where_none_is_ranked() -> None:
    answers = [answer(-3.0), answer(-1.0)]
    for best_of in (None, 2):
        assert best_answers(answers, request(2, best_of)) == answers
