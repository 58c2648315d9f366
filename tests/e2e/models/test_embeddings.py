"""Through each API, the services' embeddings and scores equal those that transformers computes."""

import base64
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from stepwell.common.v1 import common_pb2
from stepwell.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from transformers import PreTrainedModel

from tests.e2e.conftest import TEMPLATE, TinyModel
from tests.e2e.stack import Stack
from tests.e2e.tiny import MAX_MODEL_LEN, save_tokenizer
from tests.plain_http import http_post
from tests.pooling_models import class_scores, embedding, save_classifier

TOLERANCE = 2e-6
TEXTS = ["a stepwell holds water", "stairs lead down to it", "x"]


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return http_post(url, json=body)


def tokens(text: str, directory: Path) -> list[int]:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, only where it is needed

    return list(AutoTokenizer.from_pretrained(directory)(text)["input_ids"])


@pytest.fixture(scope="module")
def directory(embedding_model: TinyModel) -> Path:
    return embedding_model.directory


@pytest.fixture(scope="module")
def model(embedding_model: TinyModel) -> PreTrainedModel:
    return embedding_model.model


@pytest.fixture(scope="module")
def client(embedder: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_openai_package_gets_the_vectors_of_transformers(
    client: openai.OpenAI, embedder: Stack, model: PreTrainedModel, directory: Path
) -> None:
    given = [tokens(text, directory) for text in TEXTS]
    assert (given[0][0], given[0][-1]) == (1, 2)
    expected = [embedding(model, prompt, "last") for prompt in given]
    inputs: list[Any] = [TEXTS, given]
    for asked in inputs:
        answer = client.embeddings.create(model=embedder.model, input=asked)
        assert [item.index for item in answer.data] == [0, 1, 2]
        np.testing.assert_allclose(
            [item.embedding for item in answer.data], expected, atol=TOLERANCE
        )
        count = sum(map(len, given))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    for one in (TEXTS[0], given[0]):
        floats = client.embeddings.create(
            model=embedder.model, input=one, dimensions=8, encoding_format="float"
        )
        short = embedding(model, given[0], "last", dimensions=8)
        np.testing.assert_allclose(floats.data[0].embedding, short, atol=TOLERANCE)


def test_base64_is_the_same_numbers(embedder: Stack) -> None:
    answers = [
        post(f"{embedder.url}/v1/embeddings", {"input": TEXTS[0], "encoding_format": kind}).json()
        for kind in ("float", "base64")
    ]
    vectors = [answer["data"][0]["embedding"] for answer in answers]
    assert np.frombuffer(base64.b64decode(vectors[1]), "<f4").tolist() == vectors[0]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", "a" * (MAX_MODEL_LEN + 1)]}, "input[1]"),
        ({"input": [1, 2, 10_000]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 49}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a" * (MAX_MODEL_LEN + 1)}, "input"),
        ({"input": ["a"] * 257}, "input"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(
    embedder: Stack, body: dict[str, Any], field: str
) -> None:
    answer = post(f"{embedder.url}/v1/embeddings", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_a_prompt_may_be_as_long_as_the_model(embedder: Stack) -> None:
    body = {"input": [[5] * MAX_MODEL_LEN]}
    answer = post(f"{embedder.url}/v1/embeddings", body)
    assert answer.status_code == 200


def test_each_kind_of_model_refuses_what_the_other_one_does(embedder: Stack, stack: Stack) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    }
    for path, body in bodies.items():
        error = post(f"{embedder.url}{path}", body).json()["error"]
        assert (error["code"], error["param"]) == ("other_runner", "model")
        assert "generates no text" in error["message"]
    for path, body in {
        "/v1/embeddings": {"input": "a"},
        "/score": {"text_1": "a", "text_2": "b"},
    }.items():
        answer = post(f"{stack.url}{path}", body)
        assert answer.status_code == 400
        assert "generates text" in answer.json()["error"]["message"]


def test_scores_of_an_embedder_are_cosines(
    embedder: Stack, model: PreTrainedModel, directory: Path
) -> None:
    vectors = [embedding(model, tokens(text, directory), "last") for text in TEXTS]
    one_to_many = post(f"{embedder.url}/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()
    scores = [item["score"] for item in one_to_many["data"]]
    np.testing.assert_allclose(scores, [np.dot(vectors[0], v) for v in vectors], atol=1e-5)
    many_to_many = post(f"{embedder.url}/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]}).json()
    scores = [item["score"] for item in many_to_many["data"]]
    pairs = zip(vectors, vectors[::-1], strict=True)
    np.testing.assert_allclose(scores, [np.dot(a, b) for a, b in pairs], atol=1e-5)
    wrong = post(f"{embedder.url}/score", {"text_1": TEXTS[:2], "text_2": TEXTS})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_1")


def test_grpc_clients_get_the_vectors_of_transformers(
    embedder: Stack, model: PreTrainedModel, directory: Path
) -> None:
    prompt = tokens(TEXTS[1], directory)
    with grpc.insecure_channel(embedder.grpc) as channel:
        inference = gateway_pb2_grpc.InferenceStub(channel)
        inputs = [
            gateway_pb2.EmbedInput(text=TEXTS[1]),
            gateway_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=prompt)),
        ]
        request = gateway_pb2.EmbedRequest(inputs=inputs, request_id="mine", dimensions=4)
        answer = inference.Embed(request, timeout=60)
        expected = embedding(model, prompt, "last", dimensions=4)
        for vector in answer.vectors:
            np.testing.assert_allclose(vector.values, expected, atol=TOLERANCE)
        assert (answer.request_id, answer.usage.num_prompt_tokens) == ("mine", 2 * len(prompt))
        with pytest.raises(grpc.RpcError) as refused:
            inference.Embed(gateway_pb2.EmbedRequest(inputs=[gateway_pb2.EmbedInput()]), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "inputs[0]" in refused.value.details()
        with pytest.raises(grpc.RpcError) as refused:
            list(inference.Generate(gateway_pb2.GenerateRequest(text="a"), timeout=60))
        assert "generates no text" in refused.value.details()


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "bert")
    save_tokenizer(tmp_path, TEMPLATE)
    with closing(Stack(tmp_path, "--dtype", "float32")) as stack:
        body = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
        answer = post(f"{stack.url}/score", body).json()
        refused = post(f"{stack.url}/v1/embeddings", {"input": "a"})
        ranked = post(
            f"{stack.url}/v2/rerank", {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}
        ).json()
        classified = post(f"{stack.url}/classify", {"input": TEXTS}).json()
        pooled = post(f"{stack.url}/pooling", {"input": TEXTS, "task": "classify"}).json()
    first = tokens(TEXTS[0], tmp_path)
    expected = []
    for text in TEXTS[1:]:
        joined = first + tokens(text, tmp_path)[1:]
        logit = float(class_scores(model, joined, len(first))[0])
        expected.append(1 / (1 + math.exp(-logit)))
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=TOLERANCE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    best = max((0, 1), key=expected.__getitem__)
    [result] = ranked["results"]
    assert (result["index"], result["document"]) == (best, {"text": TEXTS[1 + best]})
    np.testing.assert_allclose(result["relevance_score"], expected[best], atol=TOLERANCE)
    logits = [float(class_scores(model, tokens(text, tmp_path))[0]) for text in TEXTS]
    probs = [1 / (1 + math.exp(-logit)) for logit in logits]
    for item, prob, vector in zip(classified["data"], probs, pooled["data"], strict=True):
        np.testing.assert_allclose(item["probs"], [prob], atol=TOLERANCE)
        assert (item["label"], item["num_classes"]) == ("LABEL_0", 1)
        assert vector["data"] == item["probs"]


def test_an_embedder_reranks_by_cosines_and_pools_but_has_no_classes(embedder: Stack) -> None:
    documents = [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]]
    asked = {"query": TEXTS[0], "documents": documents}
    scored = post(f"{embedder.url}/score", {"text_1": TEXTS[0], "text_2": [*TEXTS[1::-1], "x"]})
    scores = [item["score"] for item in scored.json()["data"]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(f"{embedder.url}{path}", {**asked, "return_documents": False}).json()
        results = answer["results"]
        assert [(one["index"], one["relevance_score"]) for one in results] == sorted(
            enumerate(scores), key=lambda pair: -pair[1]
        )
        assert not any("document" in one for one in results)
    vectors = [
        post(f"{embedder.url}{path}", {"input": TEXTS}).json()["data"]
        for path in ("/pooling", "/v1/embeddings")
    ]
    assert [one["data"] for one in vectors[0]] == [one["embedding"] for one in vectors[1]]
    for path, body, field in (
        ("/classify", {"input": "a"}, "model"),
        ("/pooling", {"input": "a", "task": "classify"}, "model"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ):
        refused = post(f"{embedder.url}{path}", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), path
        assert ("this model gives embeddings, not classes" in refused.text) == (field == "model")
