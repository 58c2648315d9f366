"""Ranks with unequal parts of a model compute the tokens that transformers computes in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.core.lockstep import Lockstep
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "six heads and three": ("llama", 2, NINE_HEADS),
    "MLPs by three, and a vocabulary that each has whole": (
        "llama",
        3,
        {**SIX_HEADS, "intermediate_size": 97, "vocab_size": VOCAB_SIZE + 1},
    ),
    "a head of keys that two ranks share, and its three of queries": (
        "granite",
        2,
        {"num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "experts by three": ("qwen3_moe", 3, SIX_HEADS),
}
MAX_TOKENS = 12


def make_requests() -> list[Request]:
    random = np.random.default_rng(11)
    return [
        Request(random.integers(3, VOCAB_SIZE, 1 + 9 * number).tolist(), MAX_TOKENS)
        for number in range(4)
    ]


@pytest.mark.parametrize("case", CASES)
def test_they_continue_as_transformers_does(case: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    kind, size, changes = CASES[case]
    model = save_tiny_model(tmp_path, kind, **changes)

    def work(thread: RankThread) -> list[Request]:
        ranks = thread.ranks
        lockstep = Lockstep(ranks, 1, thread.group.watch.explain)
        runner = build_runner(tmp_path, block_size=4, ranks=ranks, lockstep=lockstep)
        requests = make_requests()
        Driver(runner, block_size=4, num_blocks=600).run(requests, chunk=7)
        return requests

    expected = [
        model.generate(
            torch.tensor([request.prompt]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
        for request in make_requests()
    ]
    for requests in on_ranks(size, work):
        assert [request.tokens for request in requests] == expected
