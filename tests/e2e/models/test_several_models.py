"""One gateway process in front of two stacks: a model that generates, and one that embeds."""

import json
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import DEMO, TinyModel
from tests.e2e.stack import Stack
from tests.gateway.gateway_process import process, serving_address


@pytest.fixture(scope="module")
def url(
    demo_stack: Stack,
    embedder: Stack,
    embedding_model: TinyModel,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The address of a gateway of the models of both stacks, whose schedulers it uses, too."""
    models = tmp_path_factory.mktemp("models") / "models.json"
    entry = {
        "model": str(embedding_model.directory),
        "served_model_name": embedder.model,
        "schedulers": [embedder.address("scheduler")],
    }
    models.write_text(json.dumps([entry]))
    flags = {
        "--model": DEMO,
        "--served-model-name": demo_stack.model,
        "--schedulers": demo_stack.address("scheduler"),
        "--further-models": models,
        "--http-address": "127.0.0.1:0",
        "--address": "127.0.0.1:0",
    }
    with process(*(str(part) for flag in flags.items() for part in flag)) as gateway:
        yield f"http://{serving_address(gateway)}"


def test_each_model_answers_as_behind_its_own_gateway(
    url: str, demo_stack: Stack, embedder: Stack
) -> None:
    both = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)
    assert [model.id for model in both.models.list()] == [demo_stack.model, embedder.model]
    own = {
        stack.model: openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none")
        for stack in (demo_stack, embedder)
    }
    texts = [
        client.completions.create(
            model=demo_stack.model, prompt="def main(", max_tokens=12, temperature=0
        )
        .choices[0]
        .text
        for client in (both, own[demo_stack.model])
    ]
    assert texts[0] == texts[1] != ""
    vectors = [
        client.embeddings.create(model=embedder.model, input="a stepwell holds water")
        .data[0]
        .embedding
        for client in (both, own[embedder.model])
    ]
    assert vectors[0] == vectors[1] != []
    # Each model refuses what only the other can do.
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        both.embeddings.create(model=demo_stack.model, input="a")
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        both.completions.create(model=embedder.model, prompt="a")
