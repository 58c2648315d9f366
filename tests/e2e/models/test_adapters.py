"""Requests for LoRA adapters get peft's tokens, despite evictions and killed services."""

import asyncio
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from transformers import PreTrainedModel

from tests.e2e.inference import connect, generate, request
from tests.e2e.prompts import random_tokens
from tests.e2e.stack import Stack, wait_for
from tests.e2e.tiny import greedy, save_servable_model
from tests.lora_adapters import CONFIGS, adapted_model, save_adapter
from tests.plain_http import async_http_client, http_get

NUM_TOKENS = 24
NAMES = ("everywhere", "rank stabilized", "patterns")
LATE = "late"
ADAPTER_LABELS = re.compile(
    r'vllm:lora_requests_info\{.*running_lora_adapters="(.*?)",waiting_lora_adapters="(.*?)"'
)


@dataclass(frozen=True)
class Adapted:
    """A server with adapters, and peft's model for each. The key "" has no adapter."""

    stack: Stack
    models: dict[str, PreTrainedModel]
    directory: Path

    def expected(self, name: str, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        return greedy(self.models[name], prompt, num_tokens)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """A server with three LoRA adapters, of which at most two are in memory and in a step. A fourth
    one is in the directory from which operators may load adapters.
    """
    directory = tmp_path_factory.mktemp("tiny")
    save_servable_model(directory)
    adapters = tmp_path_factory.mktemp("adapters")
    paths = {
        name: save_adapter(directory, adapters / name.replace(" ", "-"), seed, **CONFIGS[name])
        for seed, name in enumerate(NAMES)
    }
    allowed = tmp_path_factory.mktemp("allowed")
    save_adapter(directory, allowed / LATE, 9, **CONFIGS["everywhere"])
    stack = Stack(
        directory,
        *("--served-model-name", "tiny", "--dtype", "float32", "--num-blocks", "200"),
        *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "32"),
        *("--lora-modules", ",".join(f"{name}={path}" for name, path in paths.items())),
        *("--lora-dir", str(allowed), "--admin-port", "0"),
    )
    models = {name: adapted_model(directory, path) for name, path in paths.items()}
    models |= {"": adapted_model(directory, None), LATE: adapted_model(directory, allowed / LATE)}
    with closing(stack):
        yield Adapted(stack, models, allowed)


@pytest.fixture
async def stub(adapted: Adapted) -> AsyncIterator[gateway_pb2_grpc.InferenceStub]:
    async with connect(adapted.stack.grpc) as stub:
        yield stub


@pytest.fixture
async def admin(adapted: Adapted) -> AsyncIterator[httpx.AsyncClient]:
    async with async_http_client(base_url=adapted.stack.admin_url) as client:
        yield client


def named(
    name: str, prompt: list[int], num_tokens: int = NUM_TOKENS
) -> gateway_pb2.GenerateRequest:
    wanted = request(prompt, num_tokens)
    wanted.model = name
    return wanted


async def test_more_adapters_than_there_is_room_for_answer_as_peft_does(
    adapted: Adapted, stub: gateway_pb2_grpc.InferenceStub
) -> None:
    # Each prompt is sent with each adapter, which must not use blocks cached for another one.
    prompts = [random_tokens(1, 40), *(random_tokens(seed, 3 + 9 * seed) for seed in range(5))]
    wanted = [(name, prompt) for prompt in prompts for name in ("", *NAMES)]
    for _ in range(2):
        answers = await asyncio.gather(*(generate(stub, named(*one)) for one in wanted))
        for one, answer in zip(wanted, answers, strict=True):
            assert answer.token_ids == adapted.expected(*one), one
    assert max(answer.num_cached_tokens for answer in answers) >= 32


async def test_answers_go_on_when_a_service_is_killed(
    adapted: Adapted, stub: gateway_pb2_grpc.InferenceStub
) -> None:
    for service in ("worker", "scheduler"):
        pid, hit = adapted.stack.pids()[service], False

        def on_tokens(count: int, service: str = service) -> None:
            nonlocal hit
            if count >= 8 and not hit:
                hit = True
                adapted.stack.hit(service, signal.SIGKILL)

        wanted = [(name, random_tokens(50 + seed, 20), 60) for seed, name in enumerate(NAMES)]
        answers = await asyncio.gather(*(generate(stub, named(*one), on_tokens) for one in wanted))
        assert hit
        for one, answer in zip(wanted, answers, strict=True):
            assert answer.token_ids == adapted.expected(*one), (service, one)
        adapted.stack.wait_until_back(service, pid)


async def test_an_operator_loads_and_unloads_an_adapter(
    adapted: Adapted, stub: gateway_pb2_grpc.InferenceStub, admin: httpx.AsyncClient
) -> None:
    prompt = random_tokens(3, 30)
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await generate(stub, named(LATE, prompt))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    loaded = await admin.post("/v1/load_lora_adapter", json={"lora_name": LATE, "lora_path": LATE})
    assert loaded.status_code == 200, loaded.text
    listed = {model.name: model.parent for model in (await list_models(stub)).models}
    assert listed == {"tiny": "", LATE: "tiny", **dict.fromkeys(NAMES, "tiny")}
    again = await admin.post("/v1/load_lora_adapter", json={"lora_name": LATE, "lora_path": LATE})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")

    first = asyncio.Event()
    running = asyncio.create_task(
        generate(stub, named(LATE, prompt, 200), lambda count: first.set() if count else None)
    )
    await first.wait()
    unloaded = await admin.post("/v1/unload_lora_adapter", json={"lora_name": LATE})
    assert unloaded.status_code == 200, unloaded.text
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await generate(stub, named(LATE, prompt))
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await running).token_ids == adapted.expected(LATE, prompt, 200)


async def list_models(stub: gateway_pb2_grpc.InferenceStub) -> gateway_pb2.ListModelsResponse:
    return await stub.ListModels(gateway_pb2.ListModelsRequest())


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "new", "lora_path": "../elsewhere"}, 403, "lora_path"),
        ({"lora_name": "new", "lora_path": "linked"}, 403, "lora_path"),
        ({"lora_name": "new", "lora_path": "nothing"}, 404, "lora_path"),
        ({"lora_name": "new", "lora_path": "broken"}, 400, "lora_path"),
        ({"lora_name": "new", "lora_path": "circle"}, 400, "lora_path"),
        ({"lora_name": "new", "lora_path": "la\0te"}, 400, "lora_path"),
        ({"lora_name": "tiny", "lora_path": LATE}, 400, "lora_name"),
        ({"lora_name": "everywhere", "lora_path": LATE}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": LATE}, 400, "lora_name"),
        ({"lora_name": "n" * 257, "lora_path": LATE}, 400, "lora_name"),
        ({"lora_name": "two\nlines", "lora_path": LATE}, 400, "lora_name"),
        ({"lora_path": LATE}, 400, "lora_name"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_by_name(
    body: dict[str, str], status: int, param: str, adapted: Adapted, admin: httpx.AsyncClient
) -> None:
    broken, linked = adapted.directory / "broken", adapted.directory / "linked"
    if not broken.exists():
        shutil.copytree(adapted.directory / LATE, broken)
        (broken / "adapter_config.json").write_text('{"peft_type": "IA3"}')
        linked.symlink_to(adapted.directory.parent)
        circle = adapted.directory / "circle"
        circle.symlink_to(circle)
    refused = await admin.post("/v1/load_lora_adapter", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text


async def test_openais_client_names_an_adapter_as_the_model(adapted: Adapted) -> None:
    url = f"{adapted.stack.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        cards = {card.id: card for card in (await client.models.list()).data}
        assert set(cards) == {"tiny", *NAMES}
        assert cards["patterns"].to_dict()["parent"] == "tiny"
        prompt = random_tokens(77, 12)
        completion = await client.completions.create(
            model="patterns", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        assert completion.model == "patterns"
        found = completion.choices[0].to_dict()["token_ids"]
        assert found == adapted.expected("patterns", prompt)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nothing", prompt="a")


async def test_the_adapters_of_requests_are_in_the_metrics(
    adapted: Adapted, stub: gateway_pb2_grpc.InferenceStub
) -> None:
    def one_waits() -> bool:
        text = http_get(f"{adapted.stack.url}/metrics").text
        named = [
            (set(running.split(",")), {waiting})
            for running, waiting in ADAPTER_LABELS.findall(text)
        ]
        return any(
            len(running) == 2 and running | waiting == {*NAMES} for running, waiting in named
        )

    # At most two adapters run at once, so the request for the third one waits.
    tasks = [
        asyncio.create_task(generate(stub, named(name, random_tokens(5, 9), 2000)))
        for name in NAMES
    ]
    try:
        await asyncio.to_thread(wait_for, one_waits, 20)
    finally:
        for task in tasks:
            task.cancel()
