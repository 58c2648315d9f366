"""Settings in tokenizer files change the requests to the scheduler."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.pool.block_hash import unpack_token_ids
from tests.gateway.fake_scheduler import VOCAB_SIZE, FakeScheduler
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import write_tokenizer

PROMPT = "the hello world of them, the stop string"


async def finished(served: Serving, **body: Any) -> dict[str, Any]:
    response = await served.http.post("/v1/completions", json={"prompt": PROMPT} | body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def test_a_tokenizer_that_truncates_and_pads_does_neither(
    served: Serving, tmp_path: Path
) -> None:
    expected, word = served.tokens(PROMPT), served.tokens("hello world")
    assert 2 < len(word) < len(expected) < 64
    model = write_tokenizer(tmp_path)
    path = model / "tokenizer.json"
    values = json.loads(path.read_text())
    values["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    values["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    path.write_text(json.dumps(values))
    async with serving(model) as running:
        await finished(running, bad_words=["hello world"], max_tokens=2)
        add = running.scheduler.adds[0]
    assert unpack_token_ids(add.prompt_token_ids) == expected
    assert word in [list(banned.ids) for banned in add.sampling.bad_words]


@pytest.mark.parametrize("named", [(), (5,), (0, 5)])
async def test_the_tokenizers_end_of_sequence_ends_an_answer(
    model: Path, named: tuple[int, ...]
) -> None:
    scheduler = FakeScheduler(eos_token_ids=named, answer=[70, 71, 0, 72, 73])
    async with serving(model, scheduler) as running:
        ended = await finished(running, max_tokens=5)
        assert ended["finish_reason"] == "stop"
        assert ended["text"] == running.tokenizer.decode([70, 71], skip_special_tokens=True)
        assert sorted(scheduler.adds[-1].sampling.eos_token_ids) == sorted({*named, 0})

        ignored = await finished(running, max_tokens=5, ignore_eos=True)
        assert ignored["finish_reason"] == "length"
        assert not scheduler.adds[-1].sampling.eos_token_ids

        later = await finished(running, max_tokens=5, min_tokens=4)
        assert later["finish_reason"] == "length"


async def test_an_end_of_sequence_that_the_model_lacks_is_no_token_to_stop_at(
    tmp_path: Path,
) -> None:
    model = write_tokenizer(tmp_path)
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first, template = len(tokenizer["model"]["vocab"]), tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        dict(template, id=token_id, content=f"<|{token_id}|>")
        for token_id in range(first, VOCAB_SIZE + 1)
    ]
    path.write_text(json.dumps(tokenizer))
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": f"<|{VOCAB_SIZE}|>"}))
    async with serving(model) as running:
        assert running.tokenizer.eos_token_id == VOCAB_SIZE
        await finished(running, max_tokens=2)
        assert list(running.scheduler.adds[0].sampling.eos_token_ids) == [0]
