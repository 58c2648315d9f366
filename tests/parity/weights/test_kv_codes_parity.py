"""With keys and values in 8 bits, a request's logits and tokens still depend only on the request,
and the logits are close to those with unrounded keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from stepwell.common.v1 import common_pb2

from services.common.request.sampling import SamplingParams
from services.worker.backends.choices import KernelsSetting, KVCacheDtype
from services.worker.core.model_runner import ModelRunner
from services.worker.sampling.logprobs import LogprobRows
from tests.parity.exact import ExactModel, drawn
from tests.parity.parallel.test_services_parity import generate as generate_over_services
from tests.parity.parallel.test_services_parity import serving
from tests.parity.scheduled import generate
from tests.parity.situations import (
    BLOCK_SIZE,
    GREEDY,
    LARGE_POOL,
    SAMPLED,
    SITUATIONS,
    build,
    prompts,
)
from tests.tiny_models import TILED, VOCAB_SIZE, save_tiny_model
from tests.worker.rank_threads import RankThread, on_ranks
from tests.worker.runner_driver import Driver, Request, build_runner
from tests.worker.staged_runner import StagedRunner

INT8 = KVCacheDtype.INT8_PER_TOKEN_HEAD
LENGTHS = [1, 2, 16, 17, 33, 63, 64, 65, 90, 130, 210]
SEQUENCES = [drawn(length, seed, VOCAB_SIZE) for seed, length in enumerate(LENGTHS)]
WITH_RUNNER_UP = SamplingParams(temperature=0, logprobs=2)
KINDS = ["llama", "gemma3", "mistral_window", "qwen3"]
"""Models with full attention, with full attention and windows in separate KV-cache groups, with
only windows, and with normalized keys.
"""


@dataclass(frozen=True)
class Case:
    kernels: KernelsSetting
    kind: str
    block_size: int
    dtype: torch.dtype

    def model(self, directory: Path, kv_cache_dtype: KVCacheDtype = INT8) -> ExactModel:
        sizes = TILED if self.dtype is torch.bfloat16 else {}
        save_tiny_model(directory, self.kind, dtype=self.dtype, **sizes)
        torch.set_num_threads(1)
        made = ExactModel(
            directory,
            self.dtype,
            self.kernels,
            kv_cache_dtype=kv_cache_dtype,
            block_size=self.block_size,
        )
        for tokens in SEQUENCES:
            made.reference(tokens)
        return made


CASES = [
    Case(KernelsSetting.NATIVE, kind, block_size, dtype)
    for kind in KINDS
    for block_size in (4, 16)
    for dtype in (torch.float32, torch.bfloat16)
]
CASES += [
    Case(KernelsSetting.TORCH, kind, block_size, dtype)
    for kind in KINDS[:2]
    for block_size, dtype in ((4, torch.float32), (16, torch.bfloat16))
]


def requests() -> list[Request]:
    return [Request(tokens, 1) for tokens in SEQUENCES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_do_not_depend_on_what_is_computed_with_them(case: Case, tmp_path: Path) -> None:
    model = case.model(tmp_path)
    for number, request in enumerate(requests()):
        model.serving(seed=1).run([request], [(7, 16)[number % 2]], "alone, in chunks")
    model.serving(seed=2).run(requests()[5:6], [1], "alone, token by token")
    chunks = [40, 9, 33, 16, 1, 21, 50]
    model.serving(seed=3).run(requests(), chunks, "together")
    model.serving(seed=4).run_preempted(requests(), np.random.default_rng(4))
    serving, first = model.serving(seed=5, keeps=True), Request(SEQUENCES[8], 2)
    serving.step([(first, len(first.prompt))], "the first")
    followers = [
        Request(first.prompt, 1) for _ in range((len(first.prompt) - 1) // case.block_size)
    ]
    for depth, follower in enumerate(followers, 1):
        serving.driver.share(first, follower, depth)
    serving.run(followers, [7], "behind cached blocks")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_off_by_little(kind: str, tmp_path: Path) -> None:
    """The root mean square error is above 0 and below 6 % of the logits' standard deviation. The
    logits of torch's kernels and of native kernels differ by less than a third of this error.
    """

    def logits(kernels: KernelsSetting, kept: KVCacheDtype) -> list[torch.Tensor]:
        case = Case(kernels, kind, 16, torch.float32)
        directory = tmp_path / f"{kernels.value} {kept.value}"
        return list(case.model(directory, kept).references.values())

    exact = logits(KernelsSetting.NATIVE, KVCacheDtype.AUTO)
    native, torchs = (logits(each, INT8) for each in (KernelsSetting.NATIVE, KernelsSetting.TORCH))
    for expected, found, other in zip(exact, native, torchs, strict=True):
        error, between = (root_mean_square(found - than) for than in (expected, other))
        assert 0 < error < 0.06 * expected.std()
        assert between < error / 3


def root_mean_square(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().mean().sqrt()


@pytest.mark.parametrize(
    ("kind", "params"),
    [("llama", GREEDY), ("llama", SAMPLED), ("gemma3", SAMPLED), ("bamba", GREEDY)],
    ids=["llama", "llama sampled", "gemma3 sampled", "bamba"],
)
async def test_tokens_are_the_same_in_every_situation(
    kind: str, params: dict[str, object], tmp_path: Path
) -> None:
    dtype = torch.float32 if kind == "bamba" else torch.bfloat16
    save_tiny_model(tmp_path, kind, dtype=dtype)
    torch.set_num_threads(1)
    runner = build_runner(
        tmp_path, block_size=BLOCK_SIZE, num_blocks=LARGE_POOL, dtype=dtype, kv_cache_dtype=INT8
    )
    runs = {
        name: await generate(
            runner, situation, common_pb2.SamplingParams(**params), async_scheduling=True
        )
        for name, situation in SITUATIONS.items()
    }
    for name, run in runs.items():
        together = SITUATIONS[name].chosen(runs["sixteen together"].outputs)
        assert run.outputs == together, name
    assert runs["preempted again and again"].num_preemptions > 0
    assert runs["sixteen together"].num_cached_tokens > 0


def served(runner: ModelRunner | StagedRunner) -> list[Request]:
    """Continues all prompts. Answers have the two most probable tokens at each position."""
    made = [Request(prompt, 12, sampling=WITH_RUNNER_UP) for prompt in prompts()]
    Driver(runner, block_size=16, num_blocks=400).run(made, chunk=9)
    return made


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_two_ranks_and_two_stages_give_the_same_tokens(kind: str, tmp_path: Path) -> None:
    """Stages compute the same results as the whole model. Ranks add in another order, which may
    change the 8-bit code of a number by one. So their tokens are the same only until two tokens are
    almost equally probable.
    """
    save_tiny_model(tmp_path, kind)
    torch.set_num_threads(1)
    options = {"block_size": 16, "num_blocks": 400, "kv_cache_dtype": INT8}
    whole = served(build_runner(tmp_path, **options))

    def serve(rank: RankThread) -> list[Request]:
        torch.set_num_threads(1)
        return served(build_runner(tmp_path, ranks=rank.ranks, **options))

    first, second = on_ranks(2, serve)
    assert [request.output for request in first] == [request.output for request in second]
    for found, expected in zip(first, whole, strict=True):
        differs = [
            mine != theirs for mine, theirs in zip(found.output, expected.output, strict=True)
        ]
        if any(differs):
            rows = LogprobRows.joined(expected.sampled_rows)
            best, runner_up = rows.logprobs[differs.index(True), 1:]
            assert best - runner_up < 0.005
    with StagedRunner(tmp_path, 2, **options) as stages:
        assert [request.output for request in served(stages)] == [one.output for one in whole]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
async def test_blocks_come_back_from_the_tier(kind: str, tmp_path: Path) -> None:
    """Requests are preempted repeatedly, with and without a host-memory tier for KV blocks."""
    save_tiny_model(tmp_path, kind, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    answers: list[Sequence[Sequence[int]]] = []
    for gib in (None, 1 / 16):
        loaded = build(tmp_path, kv_cache_dtype=INT8, kv_offloading_size=gib)
        situation = SITUATIONS["preempted again and again"]
        async with serving(loaded, situation, async_scheduling=True) as (replica, gateway):
            answers.append(await generate_over_services(gateway, prompts(), GREEDY))
            if gib is not None:
                await replica.until_idle()
                answers.append(await generate_over_services(gateway, prompts(), GREEDY))
    assert answers[0] == answers[1] == answers[2]
