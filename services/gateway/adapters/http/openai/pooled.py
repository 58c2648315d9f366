"""/v1/embeddings and /score: converts request bodies to requests, and vectors to answers."""

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from services.common.errors import InvalidArgument
from services.common.request.pooling import PoolingParams, PoolingTask
from services.common.request.sampling import SamplingParams
from services.common.telemetry import names
from services.gateway.adapters.http.exchange.asking_body import renamed
from services.gateway.adapters.http.exchange.dialect import ConvertedRequest
from services.gateway.adapters.http.exchange.json_pieces import LongList
from services.gateway.adapters.http.openai.bodies import (
    EmbeddingBody,
    InputBody,
    PooledBody,
    ScoreBody,
)
from services.gateway.adapters.http.openai.dialect import usage_body
from services.gateway.adapters.http.openai.sampling import check_texts
from services.gateway.core.request.generation import Answer, Usage
from services.gateway.core.request.inference import Inference
from services.gateway.core.request.request import ClientRequest, Prompt
from services.gateway.core.request.vectors import cosine, numbers


async def embedding_request(
    body: EmbeddingBody, inference: Inference, request_id: str
) -> ClientRequest:
    """Converts a body to a request. Raises InvalidArgument or OutOfRange if the body is invalid. An
    error about the body's `input` has the field `prompt`.
    """
    inference.check_pools(PoolingTask.EMBED)
    params = PoolingParams(dimensions=body.dimensions, use_activation=body.use_activation)
    return await prompts_request(body, inference, request_id, params)


async def prompts_request(
    body: InputBody, inference: Inference, request_id: str, params: PoolingParams
) -> ClientRequest:
    """Makes a pooling request with a prompt for each item of `input`. The answer to each prompt is
    one vector.
    """
    given = body.input
    is_single = isinstance(given, str) or not given or isinstance(given[0], int)
    inputs = [given] if is_single else given
    inference.check_num_choices(len(inputs), 1)
    kept = inference.texts.truncation(body.truncate_prompt_tokens, body.truncation_side)
    if isinstance(inputs[0], str):
        texts = cast(list[str], inputs)
        check_texts(texts, "prompt")
        with_special = body.add_special_tokens is not False
        token_ids = await inference.texts.encode(texts, add_special_tokens=with_special, kept=kept)
    else:
        given_ids = cast(list[list[int]], inputs)
        token_ids = given_ids if kept is None else [*map(kept.kept, given_ids)]
    return _client_request(body, request_id, tuple(map(Prompt, token_ids)), params)


async def score_request(body: ScoreBody, inference: Inference, request_id: str) -> ClientRequest:
    first, second = ([given] if isinstance(given, str) else given for given in _texts(body))
    return await pair_request(body, inference, request_id, {"text_1": first, "text_2": second})


async def pair_request(
    body: PooledBody, inference: Inference, request_id: str, texts_of: Mapping[str, list[str]]
) -> ClientRequest:
    """Makes the request that computes the scores of pairs of texts. `texts_of` maps the names of
    two body fields to their texts. An embedding model computes a vector for each text. Any other
    model computes a score for each pair.
    """
    pooler = inference.check_pools()
    for name, texts in texts_of.items():
        if not texts:
            raise InvalidArgument(f"{name} must not be empty", field=name)
        check_texts(texts, name)
    (name, first), (other, second) = texts_of.items()
    if len(first) not in (1, len(second)):
        raise InvalidArgument(
            f"{name} holds {len(first)} texts and {other} {len(second)}: {name} must hold one "
            f"text, or as many as {other}",
            field=name,
        )
    params = PoolingParams(use_activation=body.use_activation)
    kept = inference.texts.truncation(body.truncate_prompt_tokens, body.truncation_side)
    if pooler.task is PoolingTask.EMBED:
        inference.check_num_choices(len(first) + len(second), 1)
        prompts = []
        for name, texts in texts_of.items():
            try:
                encoded = await inference.texts.encode(texts, add_special_tokens=True, kept=kept)
            except InvalidArgument as error:
                raise renamed(error, {"prompt": name}) from error
            prompts += [Prompt(token_ids) for token_ids in encoded]
        return _client_request(body, request_id, tuple(prompts), params)
    if pooler.size != 1:
        raise InvalidArgument(
            f"this model has {pooler.size} classes: only models with one class give scores",
            field="model",
        )
    inference.check_num_choices(len(second), 1)
    pairs = list(zip(first * (len(second) // len(first)), second, strict=True))
    joined = await inference.texts.encode_pairs(pairs, kept)
    return _client_request(
        body,
        request_id,
        tuple(Prompt(ids, num_first_text_tokens=before) for ids, before in joined),
        params,
    )


def _texts(body: ScoreBody) -> tuple[str | list[str], str | list[str]]:
    return body.text_1, body.text_2


def _client_request(
    body: PooledBody, request_id: str, prompts: tuple[Prompt, ...], params: PoolingParams
) -> ClientRequest:
    return ClientRequest(
        request_id=request_id,
        prompts=prompts,
        sampling=SamplingParams(),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        skip_reading_prefix_cache=bool(body.skip_reading_prefix_cache),
        pooling=params,
    )


class ListDialect(ABC):
    """Writes an answer that has one item for each prompt or pair."""

    operation: str
    id_prefix: str

    def __init__(self, converted: ConvertedRequest[PooledBody]) -> None:
        head = {"id": converted.request.request_id, "object": "list"}
        self._head = {**head, "created": converted.created, "model": converted.model_name}

    @abstractmethod
    def items(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Generates the items."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """Returns the body of the answer. The items are encoded while the body is sent."""
        data = LongList(self.items(answers), nested=True)
        return {**self._head, "data": data, "usage": usage_body(usage)}


class EmbeddingDialect(ListDialect):
    """Writes answers of OpenAI's embeddings API."""

    operation = names.GENAI_OPERATION_EMBEDDINGS
    id_prefix = "embd"

    def __init__(self, converted: ConvertedRequest[EmbeddingBody]) -> None:
        super().__init__(converted)
        self._in_base64 = converted.body.encoding_format == "base64"

    def items(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        for index, answer in enumerate(answers):
            vector = vector_body(answer.pooled, in_base64=self._in_base64)
            yield {"object": "embedding", "index": index, "embedding": vector}


def vector_body(values: bytes, *, in_base64: bool) -> str | list[float]:
    """Returns a vector as a list of numbers, or in base64. `values` are its little-endian float32
    numbers.
    """
    return base64.b64encode(values).decode() if in_base64 else numbers(values).tolist()


class ScoreDialect(ListDialect):
    """Writes scores in vLLM's schema."""

    operation = names.GENAI_OPERATION_SCORE
    id_prefix = "score"

    def __init__(self, converted: ConvertedRequest[ScoreBody]) -> None:
        super().__init__(converted)
        texts = converted.body.text_2
        self._num_second = 1 if isinstance(texts, str) else len(texts)

    def items(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        for index, score in enumerate(pair_scores(answers, self._num_second)):
            yield {"index": index, "object": "score", "score": score}


def pair_scores(answers: Sequence[Answer], num_second: int) -> list[float]:
    """Returns one score for each of `num_second` pairs. If there is one answer per pair, the answer
    is the score. Otherwise the answers are the embeddings of all first texts and then of all second
    texts, and a pair's score is the cosine similarity of its two embeddings.
    """
    vectors = [numbers(answer.pooled) for answer in answers]
    num_first = len(vectors) - num_second
    if not num_first:
        return [vector[0] for vector in vectors]
    first = vectors[:num_first] * (num_second // num_first)
    return [*map(cosine, first, vectors[num_first:])]
