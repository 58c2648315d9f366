"""Greedy output of two ranks equals transformers' token for token in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from services.worker.core.lockstep import Lockstep
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner

KINDS = [
    "gemma3",  # windows of several groups, tied embeddings, norms of outputs
    "llama",  # two heads of keys and values for four of queries
    "llama_biases",  # one head of keys and values, which both ranks hold
    "mixtral",
    "qwen2",
    "qwen3_moe",
]
BLOCK_SIZE = 4
NUM_BLOCKS = 3000
MAX_TOKENS = 16


def make_requests() -> list[Request]:
    """Prompts of 1 to 61 tokens."""
    random = np.random.default_rng(5)
    return [
        Request(random.integers(3, VOCAB_SIZE, 1 + 12 * number).tolist(), MAX_TOKENS)
        for number in range(6)
    ]


def expected(model: PreTrainedModel, request: Request) -> list[int]:
    ids = torch.tensor([request.prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(request.prompt) :].tolist()


def serve(driver: Driver) -> list[list[Request]]:
    """The same requests in chunks of 7; preempted now and then; behind a prefix hit."""
    chunked = make_requests()
    driver.run(chunked, chunk=7)

    preempted, random = make_requests(), np.random.default_rng(3)
    while running := [request for request in preempted if not request.finished]:
        driver.step([(r, min(20, len(r.tokens) - r.num_computed)) for r in running])
        for request in running:
            if request.finished or random.random() < 0.06:
                driver.remove(request)

    first, follower = make_requests()[-1], make_requests()[-1]
    driver.step([(first, len(first.prompt))])
    driver.share(first, follower, (len(first.prompt) - 1) // BLOCK_SIZE)
    driver.run([first, follower])
    return [chunked, preempted, [first, follower]]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_continue_as_transformers_does(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save_tiny_model(tmp_path, kind, shard_bytes=50_000)

    def work(thread: RankThread) -> list[list[Request]]:
        lockstep = Lockstep(thread.group.ranks, 1, thread.group.watch.explain)
        runner = build_runner(
            tmp_path,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            ranks=thread.group.ranks,
            lockstep=lockstep,
        )
        driver = Driver(runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, keeps=True)
        return serve(driver)

    for answers in on_ranks(2, work):
        for requests in answers:
            for number, request in enumerate(requests):
                assert request.output == expected(model, request), f"request {number}"
