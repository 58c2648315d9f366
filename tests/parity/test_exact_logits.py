"""The logits of a token are a function of the tokens up to it: the same bits whatever else is
computed with it, however its sequence is cut, cached or recomputed, by one thread or by two.
"""

import numpy as np
import pytest
import torch

from services.worker.kernels.select import KernelsSetting
from tests.parity.exact import BLOCK_SIZE, ExactModel, drawn
from tests.parity.models_table import rows
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.worker.runner_driver import Request

NATIVE_KINDS = sorted(kind for row in rows() if row.run_by == "native" for kind in row.kinds)
CASES = [(KernelsSetting.NATIVE, kind) for kind in NATIVE_KINDS]
WHOLE = 512

# Around the edges of blocks of keys, with windows of 16 to 24 and 200 behind some, and one of 210.
LENGTHS = [1, 2, 5, 16, 17, 33, 63, 64, 65, 90, 130, 210]
SEQUENCES = [drawn(length, seed, VOCAB_SIZE) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def model(
    request: pytest.FixtureRequest, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> ExactModel:
    kernels_setting, kind = request.param
    directory = tmp_path_factory.mktemp(kind)
    save_tiny_model(directory, kind, dtype=dtype)
    torch.set_num_threads(1)
    made = ExactModel(directory, dtype, kernels_setting)
    for tokens in SEQUENCES:
        made.reference(tokens)
    return made


def requests() -> list[Request]:
    return [Request(tokens, 1) for tokens in SEQUENCES]


@pytest.mark.parametrize("chunk", [7, 16, WHOLE])
def test_alone(model: ExactModel, chunk: int) -> None:
    serving = model.serving(seed=1)
    for request in requests():
        serving.run([request], [chunk], f"alone, chunks of {chunk}")


def test_token_by_token(model: ExactModel) -> None:
    model.serving(seed=2).run(requests()[9:10], [1], "alone, token by token")
    model.serving(seed=2).run(requests()[:-1], [1], "together, token by token")


@pytest.mark.parametrize("size", [2, 3, 5, 16, 33, 64])
def test_in_batches(model: ExactModel, size: int) -> None:
    order = np.random.default_rng(size).permutation(size) % len(SEQUENCES)
    together = [Request(SEQUENCES[number], 1) for number in order]
    chunks = [
        int(-(-len(request.prompt) // (1 + number % 9))) for number, request in enumerate(together)
    ]
    model.serving(seed=size).run(together, chunks, f"batch of {size}")


def test_prefix_hits_of_every_depth(model: ExactModel) -> None:
    serving, first = model.serving(seed=3, keeps=True), Request(SEQUENCES[9], 2)
    serving.step([(first, len(first.prompt))], "the first")
    for depth in range(1, (len(first.prompt) - 1) // BLOCK_SIZE + 1):
        follower = Request(first.prompt, 1)
        serving.driver.share(first, follower, depth)
        serving.run([follower], [[7, 16, WHOLE][depth % 3]], f"behind {depth} cached blocks")


def test_after_preemptions(model: ExactModel) -> None:
    random, serving, running = np.random.default_rng(4), model.serving(seed=4), requests()
    while running := [request for request in running if not request.finished]:
        serving.step(
            [
                (request, int(random.integers(1, 1 + len(request.prompt) - request.num_computed)))
                for request in running
            ],
            "preempted again and again",
        )
        for request in running:
            if request.finished or random.random() < 0.2:
                serving.driver.remove(request)
