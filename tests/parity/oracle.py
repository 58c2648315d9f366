"""Compares served tokens with transformers.

If each output token is the one that transformers finds most probable after all tokens before it,
then the output is transformers' greedy continuation. So one forward pass over prompt and output
suffices in place of generation. It also yields every log-probability. Results are cached, because
tests serve the same requests in many ways. So a model must not change between two calls.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from transformers import PreTrainedModel

from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.worker.sampling.logprobs import LogprobRows
from tests.worker.runner_driver import Request

LOGPROB_TOLERANCE = 2e-4


def embedded_prompt(rows: torch.Tensor) -> PromptEmbeds:
    """A prompt of embeddings, float32 [n, hidden_size]."""
    return PromptEmbeds(len(rows), EmbedsDtype.FLOAT32, rows.numpy().tobytes())


def assert_served(model: PreTrainedModel, request: Request, name: str = "") -> None:
    """Asserts that a request's output and log-probabilities are transformers' greedy ones."""
    expected = logprobs(model, request)
    start = len(request.prompt) - 1
    assert request.output == expected[start:-1].argmax(-1).tolist(), name
    if request.sampling.logprobs is not None:
        _assert_rows(request.sampled_rows, expected[start:-1], request.output)
    if request.sampling.prompt_logprobs is not None:
        _assert_rows(request.prompt_rows, expected[:start], request.prompt[1:])


def first_choices(model: PreTrainedModel, prompt: list[int], output: list[int]) -> list[int]:
    """For each output position, transformers' most probable token after all tokens before it."""
    return list(_first_choices(model, (*prompt, *output), len(prompt)))


@lru_cache(maxsize=1024)
@torch.inference_mode()
def _first_choices(model: PreTrainedModel, tokens: tuple[int, ...], start: int) -> tuple[int, ...]:
    logits = model(input_ids=torch.tensor([tokens])).logits[0]
    return tuple(logits[start - 1 : -1].argmax(-1).tolist())


def logprobs(model: PreTrainedModel, request: Request) -> torch.Tensor:
    """Transformers' log-probabilities [n, vocab_size] after each of the request's n tokens."""
    return _logprobs(model, tuple(request.tokens), request.embeds)


@lru_cache(maxsize=64)
@torch.inference_mode()
def _logprobs(
    model: PreTrainedModel, tokens: tuple[int, ...], embeds: PromptEmbeds | None
) -> torch.Tensor:
    ids = torch.tensor([tokens])
    if embeds is None:
        logits = model(input_ids=ids).logits[0]
    else:
        inputs = model.get_input_embeddings()(ids)
        given = np.frombuffer(embeds.data, np.float32).reshape(-1, inputs.shape[2])
        inputs[0, : len(given)] = torch.from_numpy(given.copy())
        logits = model(inputs_embeds=inputs).logits[0]
    return logits.float().log_softmax(-1)


def _assert_rows(rows: Sequence[LogprobRows], expected: torch.Tensor, tokens: list[int]) -> None:
    """Asserts that each row of log-probabilities has the expected values for the token in `tokens`
    and for the most probable tokens.
    """
    if not tokens:
        assert not rows
        return
    token_ids = np.concatenate([part.token_ids for part in rows]).astype(np.int64)
    assert token_ids[:, 0].tolist() == tokens
    exact = expected.gather(1, torch.from_numpy(token_ids)).numpy()
    actual = np.concatenate([part.logprobs for part in rows])
    np.testing.assert_allclose(actual, exact, atol=LOGPROB_TOLERANCE)
    best = expected.topk(token_ids.shape[1] - 1).values.numpy()
    np.testing.assert_allclose(actual[:, 1:], best, atol=LOGPROB_TOLERANCE)
