"""The similarity of embedding vectors, and the scores in an answer."""

import json
import math
from array import array
from typing import Any

import pytest

from services.common.request.sampling import SamplingParams
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.exchange.json_pieces import json_pieces
from services.gateway.adapters.http.openai.bodies import ScoreBody
from services.gateway.adapters.http.openai.pooled import ScoreDialect
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.request import ClientRequest, Prompt
from services.gateway.core.request.vectors import cosine, numbers


def answer(*values: float) -> Answer:
    return Answer(pooled=array("f", values).tobytes())


def test_vectors_are_little_endian_float32_and_the_cosine_of_none_is_0() -> None:
    assert list(numbers(b"\x00\x00\x80\x3f\x00\x00\x00\xc0")) == [1.0, -2.0]
    assert cosine([1, 0], [1, 1]) == pytest.approx(math.sqrt(0.5))
    assert cosine([0, 0], [1, 1]) == 0.0


@pytest.mark.parametrize(
    ("first", "second", "vectors", "scores"),
    [
        ("a", ["b", "c"], [(1, 0), (2, 0), (0, 3)], [1.0, 0.0]),
        (["a", "b"], ["c", "d"], [(1, 0), (0, 1), (1, 0), (1, 0)], [1.0, 0.0]),
        ("a", ["b", "c"], [(0.25,), (0.5,)], [0.25, 0.5]),
    ],
)
def test_scores_of_one_with_many_of_pairs_and_of_a_cross_encoder(
    first: Any, second: Any, vectors: list[tuple[float, ...]], scores: list[float]
) -> None:
    request = ClientRequest("score-1", (Prompt([1]),), SamplingParams())
    body = ScoreBody(text_1=first, text_2=second)
    no_tokenizer: Any = None
    dialect = ScoreDialect(ConvertedRequest(body, request, 7 * 10**9, "tiny", no_tokenizer))
    answers = [answer(*vector) for vector in vectors]
    whole = json.loads(b"".join(json_pieces(dialect.whole(answers, Usage(5, 0, 0)))))
    assert [item["score"] for item in whole["data"]] == scores
    assert (whole["model"], whole["usage"]["total_tokens"]) == ("tiny", 5)
