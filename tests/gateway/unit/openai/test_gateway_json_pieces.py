"""The JSON of answers with long lists is written in pieces, and never in memory as a whole."""

import json
import tracemalloc
from pathlib import Path

import pytest

from services.common.request.sampling import SamplingParams
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.exchange.json_pieces import (
    HoldsLongList,
    LongList,
    json_pieces,
    to_json,
)
from services.gateway.adapters.http.openai.bodies import (
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    SamplingBody,
)
from services.gateway.adapters.http.openai.chat import ChatDialect
from services.gateway.adapters.http.openai.completions import CompletionDialect
from services.gateway.adapters.http.openai.dialect import Dialect
from services.gateway.adapters.tokenizer.hf_tokenizer import load_tokenizer
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import ClientRequest, Prompt

NUM_ANSWERS, NUM_TOKENS, WIDTH = 16, 250, 21


def test_pieces_are_the_same_json():
    value = {
        "empty": LongList([]),
        "none": {},
        "nested": LongList(({"a": LongList(range(n))} for n in (0, 1, 500)), nested=True),
        "plain": [1, "é", None],
    }
    nested = [{"a": list(range(n))} for n in (0, 1, 500)]
    expected = {"empty": [], "none": {}, "nested": nested, "plain": [1, "é", None]}
    assert json.loads(b"".join(json_pieces(value))) == expected
    assert len(next(json_pieces(LongList(range(100_000))))) < 100_000
    with pytest.raises(HoldsLongList):
        to_json({"a": LongList([])})


def test_no_piece_is_empty_which_would_end_a_chunked_body():
    for length in range(15_000, 17_000):
        assert all(json_pieces({"text": "a" * length, "tokens": LongList([1] * 200)}))


CHAT = ChatCompletionBody(messages=[ChatMessage(role="user", content="hi")])


@pytest.mark.parametrize(
    ("kind", "body"), [(ChatDialect, CHAT), (CompletionDialect, CompletionBody(prompt="hi"))]
)
def test_many_logprobs_are_never_whole_in_memory(
    kind: type[Dialect], body: SamplingBody, model: Path
):
    tokenizer = load_tokenizer(model)
    request = ClientRequest("r", (Prompt([5]),), SamplingParams(logprobs=WIDTH - 1), n=NUM_ANSWERS)
    dialect = kind(ConvertedRequest(body, request, 0, "tiny", tokenizer))
    tracemalloc.start()
    answers = [Answer() for _ in range(NUM_ANSWERS)]
    for token in range(NUM_TOKENS):
        for answer in answers:
            cells = [(token + cell) % 300 for cell in range(WIDTH)]
            rows = LogprobRows.of(WIDTH, cells, [-0.5] * WIDTH, [1])
            answer.add(Piece(0, "a", [token], rows, [token]))
    num_bytes = sum(map(len, json_pieces(dialect.whole(answers, Usage(1, 0, 1)))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # As objects, the 84,000 log-probabilities would take about 500 bytes each.
    assert num_bytes > 1_000_000
    assert peak < 4_000_000
