"""Errors of requests whose parameters, alone or together with a grammar, ban every token."""

from typing import Any

import pytest

from services.common.request.sampling import SamplingParams
from services.gateway.core.request.no_token import nothing_conforms, why_no_token
from services.gateway.core.request.request import EngineRequest

VOCAB_SIZE = 4


@pytest.mark.parametrize(
    ("sampling", "output", "is_banned"),
    [
        ({}, [], False),
        ({"allowed_token_ids": (1,), "bad_words": ((1, 1),)}, [], False),
        ({"allowed_token_ids": (1,), "bad_words": ((1, 1),)}, [1], True),
        ({"allowed_token_ids": (1,), "bad_words": ((1, 1),)}, [1, 2], False),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1, 1), (2, 1, 2))}, [2, 1], True),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1, 1), (2, 1, 2))}, [1, 1], False),
        ({"bad_words": ((3, 0), (3, 1), (3, 2), (3, 3))}, [3], True),
        ({"bad_words": ((3, 0), (3, 1), (3, 2))}, [3], False),
        ({"bad_words": ((0, 1), (2,), (3,)), "min_tokens": 2, "eos_token_ids": (0,)}, [0], True),
        ({"bad_words": ((0, 1), (2,), (3,)), "min_tokens": 1, "eos_token_ids": (0,)}, [0], False),
    ],
)
def test_bans_are_added_up(sampling: dict[str, Any], output: list[int], is_banned: bool) -> None:
    request = EngineRequest("r", [0], SamplingParams(**sampling), 0, "", 0)
    refusal = why_no_token(request, output, VOCAB_SIZE)
    assert (refusal is not None) == is_banned
    if refusal is not None:
        assert refusal.field == "bad_words"


@pytest.mark.parametrize(
    ("sampling", "banning"),
    [
        ({}, None),
        ({"bad_words": ((1,),)}, "bad_words"),
        ({"bad_words": ((1,),), "allowed_token_ids": (2,)}, "allowed_token_ids and bad_words"),
    ],
)
def test_where_nothing_conforms_the_parameters_that_ban_are_named(
    sampling: dict[str, Any], banning: str | None
) -> None:
    request = EngineRequest("r", [0], SamplingParams(**sampling), 0, "", 0)
    error = nothing_conforms(request, [5, 6, 7])
    if banning is None:
        assert error is None
        return
    assert error is not None
    assert (error.field, error.error_reason) == ("structured_outputs", "NO_CONFORMING_TOKEN")
    assert error.message == (
        f"structured_outputs: {banning} leave no token that conforms after 3 tokens of this answer"
    )
