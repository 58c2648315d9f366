"""Prompts are truncated to the same tokens as by the package `tokenizers`."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from services.common.errors import InvalidArgument
from services.gateway.adapters.tokenizer.hf_tokenizer import HfTokenizer, load_tokenizer
from services.gateway.core.truncation import Truncation, lengths_kept, truncation
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import write_tokenizer

TEXT = "the stop string, the hello world of them " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds special tokens around texts."""
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A <|end|>",
        pair="<|user|> $A <|end|> $B:1 <|end|>:1",
        special_tokens=[("<|user|>", 1), ("<|end|>", 0)],
    )
    tokenizer.save(file)
    return directory


def expected(model: Path, kept: Truncation, *texts: str, special: bool) -> Any:
    """The Encoding as truncated by the package `tokenizers`."""
    oracle = Tokenizer.from_file(str(model / "tokenizer.json"))
    oracle.enable_truncation(kept.num_tokens, direction="left" if kept.keeps_end else "right")
    return oracle.encode(*texts, add_special_tokens=special)


@pytest.mark.parametrize("keeps_end", [True, False])
@pytest.mark.parametrize("special", [True, False])
async def test_a_text_is_truncated_as_by_the_package(
    model: Path, keeps_end: bool, special: bool
) -> None:
    tokenizer = load_tokenizer(model)
    for text in (TEXT, TEXT * 500, "the", "\u00e4\u20ac" * 900):
        for num_tokens in (3, 4, 20, 700):
            kept = Truncation(num_tokens, keeps_end=keeps_end)
            [(ids, _)] = await tokenizer.encode_truncated(
                [(text,)], kept, add_special_tokens=special
            )
            assert ids == expected(model, kept, text, special=special).ids


async def test_two_texts_are_truncated_as_by_the_package(model: Path) -> None:
    tokenizer: HfTokenizer = load_tokenizer(model)
    rng = random.Random(3)
    for _ in range(60):
        texts = TEXT[: rng.randrange(1, 80)], TEXT[: rng.randrange(1, 80)]
        kept = Truncation(rng.randrange(5, 40), keeps_end=rng.random() < 0.5)
        [(ids, num_first)] = await tokenizer.encode_truncated(
            [texts], kept, add_special_tokens=True
        )
        wanted = expected(model, kept, *texts, special=True)
        assert (ids, num_first) == (wanted.ids, wanted.type_ids.index(1))


def test_of_two_texts_the_longer_is_shortened_first() -> None:
    assert lengths_kept((3, 9), 20) == (3, 9)
    assert lengths_kept((3, 9), 10) == (3, 7)
    assert lengths_kept((9, 3), 10) == (7, 3)
    assert lengths_kept((9, 8), 7) == (4, 3)


def test_what_is_kept_is_bounded() -> None:
    assert truncation(-1, 9, keeps_end=True).kept([*range(12)]) == [*range(3, 12)]
    assert truncation(9, 9, keeps_end=False).kept([*range(12)]) == [*range(9)]
    for number in (0, -2, 10):
        with pytest.raises(InvalidArgument, match="truncate_prompt_tokens must be from 1 to 9"):
            truncation(number, 9, keeps_end=True)


def sent(served: Serving) -> list[int]:
    return array("i", served.scheduler.adds[-1].prompt_token_ids).tolist()


async def test_requests_are_truncated_and_name_tokens_by_their_ids(tmp_path: Path) -> None:
    """Over HTTP, -1 keeps the last tokens of a prompt, as many as leave room for the answer."""
    async with serving(write_tokenizer(tmp_path)) as served:
        limit = served.gateway.fleet.limits().capacity

        async def asked(path: str, **body: Any) -> Any:
            answer = await served.http.post(path, json={"max_tokens": 4, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        long = {"prompt": [*range(5, 9)] * limit, "truncate_prompt_tokens": -1}
        await asked("/v1/completions", **long)
        assert len(sent(served)) == limit - 4
        await asked("/v1/completions", prompt=[5, 6, 7], truncate_prompt_tokens=2)
        assert sent(served) == [6, 7]
        right = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
        await asked("/v1/completions", prompt=[5, 6, 7], **right)
        assert sent(served) == [5, 6]
        echo = await asked(
            "/v1/completions", prompt="hello the", echo=True, truncate_prompt_tokens=1
        )
        kept = sent(served)
        assert echo["text"].startswith(served.tokenizer.decode(kept, skip_special_tokens=False))
        turn = {"messages": [{"role": "user", "content": "the " * 5}]}
        chat = await asked(
            "/v1/chat/completions",
            **turn,
            truncate_prompt_tokens=3,
            logprobs=True,
            top_logprobs=1,
            return_tokens_as_token_ids=True,
            return_token_ids=True,
        )
        assert len(sent(served)) == 3
        tokens = [entry["token"] for entry in chat["logprobs"]["content"]]
        assert tokens == [f"token_id:{token_id}" for token_id in chat["token_ids"]]
        plain = await asked(
            "/v1/completions", prompt="the", logprobs=1, return_tokens_as_token_ids=True
        )
        assert all(token.startswith("token_id:") for token in plain["logprobs"]["tokens"])
        assert all(name.startswith("token_id:") for name in plain["logprobs"]["top_logprobs"][0])
        error = await served.http.post(
            "/v1/chat/completions", json={**turn, "max_tokens": 4, "truncate_prompt_tokens": limit}
        )
        assert (error.status_code, error.json()["error"]["param"]) == (
            400,
            "truncate_prompt_tokens",
        )
