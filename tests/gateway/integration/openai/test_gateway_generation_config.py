"""Sampling parameters in generation_config.json are defaults for those that a request omits."""

import json
from pathlib import Path
from typing import Any

import pytest
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2

from services.common.errors import FailedPrecondition
from services.common.request.sampling import SamplingParams
from services.gateway.adapters.tokenizer.generation_config import read_sampling_defaults
from services.gateway.core.request.sampling_defaults import SamplingDefaults
from tests.gateway.serving import Serving, serving
from tests.gateway.tiny_tokenizer import write_tokenizer

TOLD = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "eos_token_id": 0,
    "transformers_version": "5.0.0",
}
NEUTRAL = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


def write(directory: Path, **values: Any) -> Path:
    write_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


async def asked(served: Serving, path: str = "/v1/completions", **body: Any) -> Any:
    chat = path.endswith("chat/completions")
    prompt = {"messages": [{"role": "user", "content": "the"}]} if chat else {"prompt": "the"}
    response = await served.http.post(path, json={**prompt, "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    return served.scheduler.adds[-1].sampling


async def asked_over_grpc(served: Serving, **sampling: Any) -> Any:
    request = gateway_pb2.GenerateRequest(
        text="the", sampling=common_pb2.SamplingParams(**{"max_tokens": 2, **sampling})
    )
    async for _ in served.stub.Generate(request):
        pass
    return served.scheduler.adds[-1].sampling


def numbers(sampling: common_pb2.SamplingParams) -> dict[str, float]:
    """The values of the parameters in NEUTRAL, which are neutral if the message lacks them."""
    return {
        name: pytest.approx(getattr(sampling, name)) if sampling.HasField(name) else value
        for name, value in NEUTRAL.items()
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "grpc"])
async def test_the_models_file_gives_defaults_and_clients_override_them(
    tmp_path: Path, path: str
) -> None:
    async with serving(write(tmp_path, **TOLD)) as served:

        async def ask(**given: Any) -> dict[str, float]:
            if path == "grpc":
                return numbers(await asked_over_grpc(served, **given))
            return numbers(await asked(served, path, **given))

        expected = {name: TOLD[name] for name in NEUTRAL}
        assert await ask() == expected
        assert await ask(temperature=0) == expected | {"temperature": 0}
        assert await ask(**NEUTRAL) == NEUTRAL
        if path != "grpc":
            assert await ask(top_k=-1) == expected | {"top_k": 0}


async def test_vllm_means_no_file_and_a_directory_means_its_own(tmp_path: Path) -> None:
    model = write(tmp_path / "model", **TOLD)
    async with serving(model, generation_config="vllm") as served:
        assert numbers(await asked(served)) == NEUTRAL
    other = write(tmp_path / "other", temperature=0.25, top_k=-1, top_p=None)
    async with serving(model, generation_config=str(other)) as served:
        assert numbers(await asked(served)) == NEUTRAL | {"temperature": 0.25}


async def test_max_new_tokens_is_the_length_where_a_client_names_none(tmp_path: Path) -> None:
    """As in vLLM, /v1/completions keeps its own default of 16 tokens."""
    async with serving(write(tmp_path, max_new_tokens=7)) as served:
        chat = "/v1/chat/completions"
        assert (await asked(served, chat, max_tokens=None)).max_tokens == 7
        assert (await asked(served, chat, max_tokens=9)).max_tokens == 9
        assert (await asked(served, max_tokens=None)).max_tokens == 16
        unlimited = gateway_pb2.GenerateRequest(text="the")
        async for _ in served.stub.Generate(unlimited):
            pass
        assert served.scheduler.adds[-1].sampling.max_tokens == 7


async def test_max_new_tokens_of_a_directory_bounds_every_answer(tmp_path: Path) -> None:
    directory = str(write(tmp_path, max_new_tokens=7))
    async with serving(tmp_path, generation_config=directory) as served:
        chat = "/v1/chat/completions"
        assert (await asked(served, chat, max_tokens=None)).max_tokens == 7
        assert (await asked(served, chat, max_tokens=5)).max_tokens == 5
        for path in (chat, "/v1/completions"):
            assert (await asked(served, path, max_tokens=100_000)).max_tokens == 7
        assert (await asked(served, max_tokens=None)).max_tokens == 7


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ('{"temperature": -1}', "temperature must be at least 0, not -1"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temperature": "warm"}', "temperature must be a number, not warm"),
        ('{"top_k": 2.5}', "top_k must be a whole number of -1 or more, not 2.5"),
        ('{"top_p": 0}', "top_p is 0"),
        ('{"repetition_penalty": 1' + "0" * 400 + "}", "repetition_penalty must be a number"),
        ('{"max_new_tokens": 0}', "max_new_tokens must be a whole number of 1 or more, not 0"),
        ("[]", "must hold a JSON object"),
        ('{"temperature"', "not valid JSON"),
    ],
)
def test_a_wrong_file_is_told_in_one_sentence(tmp_path: Path, values: str, problem: str) -> None:
    path = write(tmp_path) / "generation_config.json"
    path.write_text(values)
    with pytest.raises(FailedPrecondition) as refused:
        read_sampling_defaults("auto", tmp_path)
    assert refused.value.message.startswith(f"{path}: ")
    assert problem in refused.value.message
    assert "\n" not in refused.value.message


def test_a_directory_needs_the_file_and_a_model_does_not(tmp_path: Path) -> None:
    assert read_sampling_defaults("auto", tmp_path) == SamplingDefaults()
    with pytest.raises(FailedPrecondition, match=r"config\.json: the file cannot be read: No such"):
        read_sampling_defaults(str(tmp_path), tmp_path)


def test_an_override_takes_the_place_of_single_values(tmp_path: Path) -> None:
    write(tmp_path, **TOLD, max_new_tokens=7)
    changed = read_sampling_defaults("auto", tmp_path, {"temperature": 0, "top_k": -1})
    assert changed.sampling == SamplingParams(
        temperature=0.0, top_p=0.9, top_k=0, min_p=0.05, repetition_penalty=1.1
    )
    assert (changed.max_tokens, changed.most_tokens) == (7, None)
    bounded = read_sampling_defaults("vllm", tmp_path, {"max_new_tokens": 5, "top_p": None})
    assert bounded == SamplingDefaults(SamplingParams(), 5, 5)
    file_bounds = read_sampling_defaults(str(tmp_path), tmp_path, {"max_new_tokens": 3})
    assert (file_bounds.max_tokens, file_bounds.most_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ({"temperature": -1}, "temperature must be at least 0, not -1"),
        ({"top_k": True}, "top_k must be a whole number of -1 or more, not True"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of 1 or more, not 0"),
        ({"temprature": 1}, "temprature is not read; it may have temperature, top_p"),
    ],
)
def test_a_wrong_override_is_told_in_one_sentence(
    tmp_path: Path, override: dict[str, Any], problem: str
) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        read_sampling_defaults("auto", tmp_path, override)
    assert refused.value.message.startswith(f"--override-generation-config: {problem}")
