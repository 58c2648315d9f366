"""On two ranks, every kind of model continues prompts with the tokens that transformers computes in
float32.

Requests run in chunks, are preempted, and start after prefix hits. Some prompts are embeddings, and
some requests have log-probabilities of prompts and outputs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.request.sampling import SamplingParams
from services.worker.core.lockstep import Lockstep
from services.worker.models.errors import UnsupportedModel
from tests.parity.oracle import assert_served, embedded_prompt
from tests.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner

BLOCK_SIZE = 4
NUM_BLOCKS = 3000
MAX_TOKENS = 16
WITH_LOGPROBS = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=3)


def make_requests() -> list[Request]:
    """Requests with prompts of 1 to 61 tokens, some longer than windows of 16 to 24 tokens."""
    random = np.random.default_rng(5)
    return [
        Request(random.integers(3, VOCAB_SIZE, 1 + 12 * number).tolist(), MAX_TOKENS)
        for number in range(6)
    ]


def embedded_requests(hidden_size: int) -> list[Request]:
    """Two requests: a prompt of embeddings, and a prompt with tokens after its embeddings."""
    rows = torch.randn((30, hidden_size), generator=torch.Generator().manual_seed(1))
    embeds = embedded_prompt(rows)
    return [
        Request(prompt, MAX_TOKENS, embeds=embeds)
        for prompt in (embeds.placeholders, [*embeds.placeholders, 9, 8, 7])
    ]


def serve(driver: Driver, hidden_size: int) -> dict[str, list[Request]]:
    """Serves the same requests in several ways. Returns the requests of each way."""
    chunked = make_requests()
    for request in chunked[1::2]:
        request.sampling = WITH_LOGPROBS
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

    embedded = embedded_requests(hidden_size)
    driver.run(embedded, chunk=7)
    return {
        "chunks": chunked,
        "preempted": preempted,
        "prefix hit": [first, follower],
        "embeddings": embedded,
    }


_RECURRENT = "has recurrent layers, whose states cannot be divided among ranks"
UNDIVIDED = {
    "afmoe": "has a tensor-parallel plan whose style 'packed_colwise'",
    "gemma4": "has 32 columns in model.layers.1.self_attn.k_proj, which 2 heads cannot divide",
    "gemma4_moe": "has a tensor-parallel plan whose style 'packed_colwise'",
    "gemma3n": "cannot be divided among ranks: its MLPs compare all activations",
    "bamba": _RECURRENT,
    "falcon_h1": _RECURRENT,
    "granite_hybrid": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "jetmoe": "has no tensor-parallel plan in transformers, so it cannot be divided among ranks",
}


@pytest.mark.parametrize("kind", UNDIVIDED)
def test_what_ranks_cannot_divide_is_refused(kind: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, kind)

    def work(thread: RankThread) -> None:
        build_runner(
            tmp_path,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            ranks=thread.ranks,
            lockstep=Lockstep(thread.ranks, 1, thread.group.watch.explain),
        )

    with pytest.raises(UnsupportedModel, match=UNDIVIDED[kind]):
        on_ranks(2, work)


@pytest.mark.parametrize("kind", [kind for kind in TINY_MODELS if kind not in UNDIVIDED])
def test_two_ranks_continue_as_transformers_does(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save_tiny_model(tmp_path, kind, shard_bytes=50_000)

    def work(thread: RankThread) -> dict[str, list[Request]]:
        lockstep = Lockstep(thread.ranks, 1, thread.group.watch.explain)
        runner = build_runner(
            tmp_path,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            ranks=thread.ranks,
            lockstep=lockstep,
        )
        driver = Driver(runner, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, keeps=True)
        return serve(driver, model.config.hidden_size)

    answers, other = on_ranks(2, work)
    for situation, requests in answers.items():
        assert [request.output for request in requests] == [
            request.output for request in other[situation]
        ]
        for number, request in enumerate(requests):
            assert_served(model, request, f"{situation}: request {number}")
