"""The event for text in a stream, made by inserting the text into a prepared frame, has the same
bytes as the serialized chunk.
"""

from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.request.finish import FinishReason
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.openai.bodies import (
    ChatCompletionBody,
    ChatMessage,
    CompletionBody,
    StreamOptions,
)
from services.gateway.adapters.http.openai.chat import ChatDialect
from services.gateway.adapters.http.openai.completions import CompletionDialect
from services.gateway.adapters.http.openai.dialect import Dialect
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.request.choice import Piece
from services.gateway.core.request.generation import Usage
from services.gateway.core.request.request import ClientRequest, Prompt
from tests.gateway.tiny_tokenizer import write_tokenizer

PROMPT = Prompt([5, 6], "echoed")
USAGE = Usage(2, 0, 1)
PIECES = st.builds(
    Piece,
    st.integers(0, 1),
    st.text(max_size=4) | st.sampled_from(['"\\', "\0", "\1", "é\u2028"]),
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    finish_reason=st.none() | st.just(FinishReason.STOP),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return load_tokenizer(cast(Path, write_tokenizer(tmp_path_factory.mktemp("model"))))


def make_dialect(api: str, tokenizer: HfTokenizer, *, ids: bool, counts: bool) -> Dialect:
    options = StreamOptions(include_usage=True, continuous_usage_stats=counts)
    request = ClientRequest("r", (PROMPT,), SamplingParams(), n=2)
    if api == "chat":
        said = [ChatMessage(role="user", content="hi")]
        chat = ChatCompletionBody(messages=said, return_token_ids=ids, stream_options=options)
        return ChatDialect(ConvertedRequest(chat, request, 7 * 10**9, "tiny", tokenizer))
    completion = CompletionBody(prompt="hi", return_token_ids=ids, stream_options=options)
    return CompletionDialect(ConvertedRequest(completion, request, 7 * 10**9, "tiny", tokenizer))


@settings(max_examples=300, deadline=None)
@given(
    api=st.sampled_from(["chat", "completions"]),
    ids=st.booleans(),
    counts=st.booleans(),
    pieces=st.lists(PIECES, max_size=8),
)
def test_an_event_of_text_is_that_of_its_chunk(
    tokenizer: HfTokenizer, api: str, ids: bool, counts: bool, pieces: list[Piece]
) -> None:
    whole, framed = (make_dialect(api, tokenizer, ids=ids, counts=counts) for _ in range(2))
    num_framed = 0
    for piece in pieces:
        expected = b"".join(whole.encode_chunks(whole.chunks(piece), lambda: USAGE))
        event = framed.text_event(piece)
        num_framed += event is not None
        if event is None:
            event = b"".join(framed.encode_chunks(framed.chunks(piece), lambda: USAGE))
        assert event == expected
    num_later = sum(bool(piece.text) and piece.finish_reason is None for piece in pieces) - len(
        {piece.index for piece in pieces if piece.text and piece.finish_reason is None}
    )
    assert num_framed == (0 if counts else num_later)
