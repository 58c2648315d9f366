"""The logits of a token depend only on the tokens up to it. They have the same bits in any batch
and with any chunks, cached or recomputed, with one thread or two.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import KernelsSetting
from tests.parity.exact import BLOCK_SIZE, ExactModel, drawn
from tests.parity.models_table import rows
from tests.parity.oracle import embedded_prompt
from tests.tiny_models import TILED, VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Request

SAME_BUT_FOR_CONSTANTS = {"llama_linear", "llama_llama3", "llama_yarn"}
"""Kinds of models that differ from `llama` only in constants of the rotary embedding."""
NATIVE_KINDS = sorted(
    {kind for row in rows() if row.run_by == "native" for kind in row.kinds}
    - SAME_BUT_FOR_CONSTANTS
)
TORCH_KINDS = [row.kinds[0] for row in rows() if row.run_by == "native"]
TORCH_KINDS += ["mistral_window", "starcoder2"]
CASES = [(KernelsSetting.NATIVE, kind) for kind in [*NATIVE_KINDS, "gpt_neox"]]
CASES += [(KernelsSetting.TORCH, kind) for kind in TORCH_KINDS]
WHOLE = 512
COLUMNS = ("token_ids", "logprobs", "ranks")

# Lengths near multiples of the kernels' blocks of keys. Some exceed the windows of 16 to 24 tokens,
# and one exceeds the window of 200 tokens.
LENGTHS = [1, 2, 5, 16, 17, 33, 63, 64, 65, 90, 130, 210]
SEQUENCES = [drawn(length, seed, VOCAB_SIZE) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def model(
    request: pytest.FixtureRequest, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> ExactModel:
    """A model with the reference logits of all sequences."""
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


@pytest.mark.parametrize(
    ("chunk", "served"),
    [(7, slice(0, None, 2)), (16, slice(1, None, 2)), (WHOLE, slice(None))],
    ids=["7", "16", "whole"],
)
def test_logits_of_a_request_alone_are_the_same_bits_in_any_chunks(
    model: ExactModel, chunk: int, served: slice
) -> None:
    serving = model.serving(seed=1)
    for request in requests()[served]:
        serving.run([request], [chunk], f"alone, chunks of {chunk}")


def test_logits_token_by_token_are_the_same_bits(model: ExactModel) -> None:
    """The last 20 tokens of each sequence are computed one by one. Together, the sequences of
    different lengths cover most positions.
    """
    for served, name in ((slice(8, 9), "alone"), (slice(None), "together")):
        serving, together = model.serving(seed=2), requests()[served]
        firsts = [(request, max(1, len(request.prompt) - 20)) for request in together]
        serving.step(firsts, f"{name}, the first tokens")
        serving.driver.remove_finished(together)
        serving.run(together, [1], f"{name}, token by token")


@pytest.mark.parametrize("size", [2, 5, 16, 64])
def test_logits_in_batches_are_the_same_bits(model: ExactModel, size: int) -> None:
    order = np.random.default_rng(size).permutation(size) % len(SEQUENCES)
    together = [Request(SEQUENCES[number], 1) for number in order]
    chunks = [
        int(-(-len(request.prompt) // (1 + number % 5))) for number, request in enumerate(together)
    ]
    model.serving(seed=size).run(together, chunks, f"batch of {size}")


def test_logits_behind_prefix_hits_of_every_depth_are_the_same_bits(model: ExactModel) -> None:
    serving, first = model.serving(seed=3, keeps=True), Request(SEQUENCES[9], 2)
    serving.step([(first, len(first.prompt))], "the first")
    depths = range(1, (len(first.prompt) - 1) // BLOCK_SIZE + 1)
    followers = [Request(first.prompt, 1) for _ in depths]
    for follower, depth in zip(followers, depths, strict=True):
        serving.driver.share(first, follower, depth)
    serving.run(followers, [7, 16, WHOLE], "behind cached blocks")


def test_logits_after_preemptions_are_the_same_bits(model: ExactModel) -> None:
    model.serving(seed=4).run_preempted(requests(), np.random.default_rng(4))


WIDE = {"hidden_size": 384, "intermediate_size": 1536}
"""The sizes of a model whose steps mostly have enough work for two threads."""


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "qwen3"])
def test_one_thread_or_two(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    changes = WIDE | ({"head_dim": 96} if kind == "qwen3" else {})
    save_tiny_model(tmp_path, kind, dtype=dtype, **changes)
    torch.set_num_threads(2)
    model = ExactModel(tmp_path, dtype, KernelsSetting.NATIVE)
    for tokens in SEQUENCES[3:10]:
        model.reference(tokens)
    serving = model.serving(seed=5)
    for request in requests()[6:10]:
        serving.run([request], [WHOLE], "alone, two threads")
    serving.run(requests()[3:10], [40, 9, 33, 16, 21, 50], "batch, two threads")
    serving.run(requests()[3:6], [1], "token by token, two threads")


@pytest.mark.parametrize("kind", ["llama_biases", "qwen3_moe"])
def test_logits_of_two_ranks_are_the_same_bits_in_any_batch(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    save_tiny_model(tmp_path, kind, dtype=dtype)
    torch.set_num_threads(1)

    def serve(rank: RankThread) -> None:
        model = ExactModel(tmp_path, dtype, KernelsSetting.NATIVE, rank.ranks)
        for tokens in SEQUENCES:
            model.reference(tokens)
        model.serving(seed=6).run(requests(), [40, 9, 33, 16, 21, 50], "batch on two ranks")
        model.serving(seed=7).run(requests()[3:9], [1], "token by token on two ranks")

    on_ranks(2, serve)


def test_embedded_prompts_and_those_beside_them(model: ExactModel) -> None:
    width = model.recorder.embed(torch.zeros(1, dtype=torch.int64)).shape[1]
    rows = torch.randn((50, width), generator=torch.Generator().manual_seed(3))

    def embedded() -> Request:
        embeds = embedded_prompt(rows)
        return Request([*embeds.placeholders, 9, 8, 7], 1, embeds=embeds)

    alone = embedded()
    serving = model.serving(seed=8)
    serving.driver.step([(alone, 53)])
    model.references[tuple(alone.prompt)] = model.recorder.logits_of(serving.row_of(alone)).clone()
    together = [embedded(), *requests()[3:9]]
    model.serving(seed=9).run(together, [7, 16, 5], "beside an embedded prompt")


@pytest.mark.parametrize("kind", ["gemma2", "mixtral"])
def test_a_request_of_nan_changes_no_logits_beside_it(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    save_tiny_model(tmp_path, kind, dtype=dtype, **TILED)
    model = ExactModel(tmp_path, dtype, KernelsSetting.NATIVE)
    others = requests()[3:10]
    for request in others:
        model.reference(request.prompt)
    embeds = embedded_prompt(torch.full((300, TILED["hidden_size"]), torch.nan))
    spoiled = Request([*embeds.placeholders, 9], 1, embeds=embeds)
    serving = model.serving(seed=10)
    while running := [request for request in others if not request.finished]:
        chunks = [
            (one, min(number % 3 * 8 + 1, len(one.prompt) - one.num_computed))
            for number, one in enumerate(running)
        ]
        count = 3 if spoiled.num_computed < 300 else 0
        serving.step(chunks, "beside NaN", [(spoiled, count)] if count else ())
        if count:
            assert model.recorder.logits_of(serving.row_of(spoiled)).isnan().all()
        serving.driver.remove_finished(running)


def test_log_probabilities_are_the_same_bits_however_served(model: ExactModel) -> None:
    watched = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=3)

    def served(chunk: int, count: int) -> list[np.ndarray]:
        driver = model.serving(seed=count).driver
        request = Request(SEQUENCES[9], 4, watched)
        driver.run([request, *(Request(tokens, 3) for tokens in SEQUENCES[:count])], chunk=chunk)
        rows = [*request.prompt_rows, *request.sampled_rows]
        return [np.concatenate([getattr(row, name) for row in rows]) for name in COLUMNS]

    whole = served(WHOLE, 0)
    for chunk, count in ((7, 0), (16, 5), (WHOLE, 12)):
        for actual, expected in zip(served(chunk, count), whole, strict=True):
            np.testing.assert_array_equal(actual, expected)
