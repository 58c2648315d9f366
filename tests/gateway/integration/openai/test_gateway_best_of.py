"""With `best_of`, /v1/completions returns the best of several answers to a prompt."""

from typing import Any

import pytest

from tests.gateway.serving import Serving

ASK = {"prompt": ["the", "hello"], "max_tokens": 5, "seed": 7, "temperature": 1}


def by_token(token_id: int) -> float:
    """A log-probability that depends on the token, so that answers have different means."""
    return -(token_id % 17) / 4


@pytest.fixture
def served(served: Serving) -> Serving:
    served.scheduler.logprob = by_token
    return served


async def complete(served: Serving, **more: Any) -> dict[str, Any]:
    response = await served.http.post("/v1/completions", json={**ASK, **more})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def best(choices: list[dict[str, Any]], n: int) -> list[str]:
    def mean(choice: dict[str, Any]) -> float:
        logprobs: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    return [choice["text"] for choice in sorted(choices, key=mean, reverse=True)[:n]]


async def test_the_answers_with_the_highest_mean_log_probability_are_returned(
    served: Serving,
) -> None:
    """First requests all answers with the same seeds, and selects the best of them here."""
    every = (await complete(served, n=6, logprobs=0))["choices"]
    expected = [*best(every[:6], 2), *best(every[6:], 2)]
    body = await complete(served, n=2, best_of=6)
    assert [choice["text"] for choice in body["choices"]] == expected
    assert expected != [every[index]["text"] for index in (0, 1, 6, 7)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
    assert body["usage"]["completion_tokens"] == 2 * 6 * 5
    assert body["usage"]["prompt_tokens"] == len(served.tokens("the") + served.tokens("hello"))


async def test_log_probabilities_that_were_asked_for_come_with_the_best(served: Serving) -> None:
    every = (await complete(served, prompt="a", n=4, logprobs=2))["choices"]
    (choice,) = (await complete(served, prompt="a", best_of=4, logprobs=2))["choices"]
    (expected,) = best(every, 1)
    (same,) = [one for one in every if one["text"] == expected]
    assert choice["logprobs"] == same["logprobs"]


async def test_best_of_n_returns_all_and_can_be_streamed(served: Serving) -> None:
    every = (await complete(served, n=3))["choices"]
    assert (await complete(served, n=3, best_of=3))["choices"] == every
    assert not any(add.sampling.HasField("logprobs") for add in served.scheduler.adds)
    ask = {**ASK, "n": 3, "best_of": 3, "stream": True}
    response = await served.http.post("/v1/completions", json=ask)
    assert response.status_code == 200
    assert response.text.endswith("data: [DONE]\n\n")


async def test_an_echo_comes_with_the_best(served: Serving) -> None:
    (choice,) = (await complete(served, prompt="the", best_of=3, echo=True))["choices"]
    (plain,) = (await complete(served, prompt="the", best_of=3))["choices"]
    assert choice["text"] == "the" + plain["text"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": -1}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 200}, "best_of"),
        ({"n": 2, "best_of": "3"}, "best_of"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    served: Serving, fields: dict[str, Any], named: str
) -> None:
    response = await served.http.post("/v1/completions", json={**ASK, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == named
    assert served.scheduler.adds == []
