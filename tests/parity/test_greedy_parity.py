"""In float32, greedy output has the tokens that transformers computes, however requests are served.

Every kind of model is served with blocks of 4 and of 16 tokens and short chunks. Other sizes are
tested with one kind of model for each kind of cache.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.worker.backends.choices import KernelsSetting
from services.worker.core.model_runner import ModelRunner
from tests.parity.oracle import first_choices
from tests.tiny_models import (
    CACHES,
    MAX_POSITION_EMBEDDINGS,
    TINY_MODELS,
    VOCAB_SIZE,
    build_tiny_model,
)
from tests.worker.runner_driver import Driver, Request, build_runner

NUM_REQUESTS = 16
NUM_BLOCKS = 6400
KINDS = sorted(TINY_MODELS)
TORCH_KINDS = ["gemma2", "gemma3", "llama", "mistral_window", "mixtral", "opt", "qwen2_window"]
TORCH_KINDS += ["qwen3_moe", "qwen3_next"]
"""Kinds of models that call kernels in ways of their own."""
NOT_INVARIANT = "torch, not batch-invariant"
SERVED = [(kind, "auto") for kind in KINDS]
SERVED += [(kind, "torch") for kind in TORCH_KINDS]
SERVED += [(kind, NOT_INVARIANT) for kind in ("llama", "gemma2", "gpt_neox")]

EVERY = pytest.mark.parametrize("served", SERVED, indirect=True, ids="-".join)
EACH_CACHE = pytest.mark.parametrize(
    "served",
    [case for case in SERVED if case[0] in CACHES and case != ("qwen3_next", "torch")],
    indirect=True,
    ids="-".join,
)
"""One kind of model for each kind of cache. Kinds with recurrent layers are served with only one
kind of kernels, because kernels do not read recurrent states.
"""

Build = Callable[..., Driver]
Served = tuple[PreTrainedModel, Build, list[Request]]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A reference model, a function that builds drivers over the same weights, and requests.
    Drivers with the same block size share one runner, whose blocks keep their old contents.
    """
    torch.set_num_threads(1)
    kind, setting = request.param
    directory: Path = tmp_path_factory.mktemp(kind)
    reference(kind).save_pretrained(directory, max_shard_size=50_000)

    @cache
    def runner(block_size: int) -> ModelRunner:
        return build_runner(
            directory,
            block_size=block_size,
            num_blocks=NUM_BLOCKS,
            kernels_setting=KernelsSetting(setting.partition(",")[0]),
            batch_invariant=setting != NOT_INVARIANT,
        )

    def build(block_size: int = 16, *, keeps: bool = False) -> Driver:
        runner(block_size).reset()
        return Driver(runner(block_size), block_size=block_size, num_blocks=NUM_BLOCKS, keeps=keeps)

    return reference(kind), build, make_requests()


@cache
def reference(kind: str) -> PreTrainedModel:
    """transformers' model of a kind, built once for all kernels."""
    return build_tiny_model(kind)


def make_requests() -> list[Request]:
    """Requests with prompts of 1 to 91 tokens and outputs of 6 to 13 tokens."""
    random = np.random.default_rng(7)
    return [
        Request(random.integers(3, VOCAB_SIZE, 1 + 6 * number).tolist(), 6 + number // 2)
        for number in range(NUM_REQUESTS)
    ]


def assert_parity(model: PreTrainedModel, requests: list[Request]) -> None:
    for number, request in enumerate(requests):
        assert len(request.output) == request.max_tokens
        expected = first_choices(model, request.prompt, request.output)
        assert request.output == expected, f"request {number}"


def fresh(requests: list[Request]) -> list[Request]:
    return [Request(request.prompt, request.max_tokens) for request in requests]


@EVERY
def test_requests_alone_have_the_tokens_of_transformers(served: Served) -> None:
    serve_alone(served, 4)


def serve_alone(served: Served, block_size: int) -> None:
    model, build, requests = served
    driver = build(block_size)
    alone = fresh(requests[::5])
    for request in alone:
        driver.run([request])
    assert_parity(model, alone)


@EVERY
def test_sixteen_together_with_prompts_in_chunks_of_7(served: Served) -> None:
    serve_together(served, 4)


def serve_together(served: Served, block_size: int) -> None:
    model, build, requests = served
    together = fresh(requests)
    build(block_size).run(together, chunk=7)
    assert_parity(model, together)
    distinct = min(len(set(request.output)) for request in together[8:])
    assert distinct >= 4, "outputs vary, so that equal ones tell something"


@EACH_CACHE
def test_sixteen_that_join_one_after_the_other(served: Served) -> None:
    model, build, requests = served
    driver, together = build(), fresh(requests)
    for number in range(1, NUM_REQUESTS + 1):
        driver.step(
            [
                (request, len(request.tokens) - request.num_computed)
                for request in together[:number]
                if not request.finished
            ]
        )
        driver.remove_finished(together)
    driver.run(together)
    assert_parity(model, together)


@EVERY
def test_prefix_hits_share_blocks_with_the_first_request(served: Served) -> None:
    serve_behind_prefix_hits(served, 4)


def serve_behind_prefix_hits(served: Served, block_size: int) -> None:
    model, build, requests = served
    prompt = requests[-1].prompt
    first = Request(prompt, 4)
    # The first follower has the prompt of `first`. The prompts of the second and third share 48 and
    # 70 tokens with it.
    followers = [
        Request(prompt, 16),
        Request([*prompt[:48], 9, 8, 7], 16),
        Request([*prompt[:70], *requests[3].prompt], 16),
    ]
    driver = build(block_size, keeps=True)
    # Recurrent layers store a state only at the end of a step.
    has_states = bool(driver.runner.limits.state_block_sizes)
    while first.num_computed < len(prompt):
        left = len(prompt) - first.num_computed
        driver.step([(first, min(block_size, left) if has_states else left)])
    for follower, common in zip(followers, (len(prompt) - 1, 48, 70), strict=True):
        driver.share(first, follower, common // block_size)
    driver.run([first, *followers])
    assert_parity(model, [first, *followers])


@EACH_CACHE
def test_blocks_of_one_token(served: Served) -> None:
    serve_alone(served, 1)
    serve_together(served, 1)


@EACH_CACHE
def test_prefix_hits_share_blocks_of_16_tokens(served: Served) -> None:
    serve_behind_prefix_hits(served, 16)


@EVERY
def test_preempted_again_and_again(served: Served) -> None:
    serve_preempted(served, 5)


@EACH_CACHE
def test_preempted_again_and_again_and_computed_in_one_step(served: Served) -> None:
    serve_preempted(served, MAX_POSITION_EMBEDDINGS)


def serve_preempted(served: Served, chunk: int) -> None:
    model, build, requests = served
    driver, together = build(), fresh(requests[:10])
    random = np.random.default_rng(3)
    while running := [request for request in together if not request.finished]:
        driver.step(
            [
                (request, min(chunk, len(request.tokens) - request.num_computed))
                for request in running
            ]
        )
        for request in running:
            if request.finished or random.random() < 0.1:
                driver.remove(request)
    assert_parity(model, together)
