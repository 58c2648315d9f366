"""Prompts that consist of embeddings instead of token ids."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.errors import InvalidArgument
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.common.request.sampling import SamplingParams
from services.worker.core.model_runner import ModelRunner
from services.worker.core.step import NewRequest, StepInput
from tests.tiny_models import save_tiny_model
from tests.worker.runner_driver import GREEDY, build_runner, ints

PROMPT = [7, 8, 9, 10, 11, 12, 13]
BLOCKS = np.arange(1, 9, dtype=np.int32)


def step(number: int, scheduled: int, computed: int, *new: NewRequest) -> StepInput:
    return StepInput(1, number, ints(0), ints(scheduled), ints(computed), new_requests=new)


def entering(
    runner: ModelRunner, tokens: list[int], embeds: PromptEmbeds | None, sampling: SamplingParams
) -> NewRequest:
    tables = tuple(BLOCKS + 8 * group for group in range(len(runner.limits.windows)))
    end = 0 if embeds is None else embeds.num_tokens
    return NewRequest(0, ints(*tokens), len(PROMPT), sampling, tables, embeds, end)


def generate(
    runner: ModelRunner,
    embeds: PromptEmbeds | None = None,
    sampling: SamplingParams = GREEDY,
    chunk: int = len(PROMPT),
) -> list[int]:
    """Generates eight tokens. The prompt is computed in chunks of `chunk` tokens."""
    runner.reset()
    tokens = PROMPT if embeds is None else [*embeds.placeholders, *PROMPT[embeds.num_tokens :]]
    output: list[int] = []
    for number, begin in enumerate(range(0, len(PROMPT), chunk)):
        count = min(chunk, len(PROMPT) - begin)
        new = [entering(runner, tokens, embeds, sampling)] if begin == 0 else []
        output += runner.execute(step(number, count, begin, *new)).token_ids.tolist()
    while len(output) < 8:
        computed = len(PROMPT) + len(output) - 1
        output += runner.execute(step(10 + len(output), 1, computed)).token_ids.tolist()
    return output


def embed(model: torch.nn.Module, tokens: list[int]) -> PromptEmbeds:
    with torch.inference_mode():
        rows = model.get_input_embeddings()(torch.tensor(tokens))
    return PromptEmbeds(len(tokens), EmbedsDtype.FLOAT32, rows.numpy().tobytes())


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gemma3", "opt", "cohere2"])
def test_embeddings_of_tokens_give_what_the_tokens_give(tmp_path: Path, kind: str) -> None:
    torch.set_num_threads(1)
    model = save_tiny_model(tmp_path, kind)
    runner = build_runner(tmp_path, block_size=4, num_blocks=60)
    expected = generate(runner)
    assert generate(runner, embed(model, PROMPT)) == expected
    assert generate(runner, embed(model, PROMPT), chunk=3) == expected
    assert generate(runner, embed(model, PROMPT), chunk=1) == expected
    # A prompt may have token ids after its embeddings.
    assert generate(runner, embed(model, PROMPT[:4]), chunk=3) == expected


def test_penalties_ignore_placeholders(tmp_path: Path) -> None:
    """Embeddings have placeholders as token ids, which penalties must ignore."""
    model = save_tiny_model(tmp_path, "llama")
    runner = build_runner(tmp_path, block_size=4, num_blocks=60)
    first = generate(runner)[0]
    repelled = SamplingParams(temperature=0, repetition_penalty=9.0)
    zeros = PromptEmbeds(len(PROMPT), EmbedsDtype.FLOAT32, embed(model, PROMPT).data)
    assert generate(runner, zeros, repelled)[0] == first


@pytest.mark.parametrize("dtype", [EmbedsDtype.BFLOAT16, EmbedsDtype.FLOAT16])
def test_embeddings_in_half_precision_are_accepted(tmp_path: Path, dtype: EmbedsDtype) -> None:
    save_tiny_model(tmp_path, "llama")
    runner = build_runner(tmp_path, block_size=4, num_blocks=60)
    rows = torch.randn(len(PROMPT), 48).bfloat16().half().float()
    whole = PromptEmbeds(len(PROMPT), EmbedsDtype.FLOAT32, rows.numpy().tobytes())
    stored = rows.to(torch.bfloat16 if dtype is EmbedsDtype.BFLOAT16 else torch.float16)
    half = PromptEmbeds(len(PROMPT), dtype, stored.view(torch.uint8).numpy().tobytes())
    assert generate(runner, half) == generate(runner, whole)


@pytest.mark.parametrize(
    ("embeds", "problem"),
    [
        (PromptEmbeds(7, EmbedsDtype.FLOAT32, bytes(7 * 47 * 4)), "prompt_embeds has 1316 bytes"),
        (
            PromptEmbeds(8, EmbedsDtype.FLOAT32, bytes(8 * 48 * 4)),
            "the embeddings are for tokens 0 to 8",
        ),
    ],
)
def test_a_matrix_of_another_width_is_refused_and_the_batch_unchanged(
    tmp_path: Path, embeds: PromptEmbeds, problem: str
) -> None:
    save_tiny_model(tmp_path, "llama")
    runner = build_runner(tmp_path, block_size=4, num_blocks=60)
    with pytest.raises(InvalidArgument, match=problem):
        runner.execute(step(1, 7, 0, entering(runner, PROMPT, embeds, GREEDY)))
    assert len(runner.execute(step(2, 7, 0, entering(runner, PROMPT, None, GREEDY))).token_ids) == 1


def test_embeddings_of_computed_tokens_may_be_omitted(tmp_path: Path) -> None:
    """After a prefix hit, only the embeddings of the uncached tokens are needed."""
    model = save_tiny_model(tmp_path, "llama")
    runner = build_runner(tmp_path, block_size=4, num_blocks=60)
    whole = embed(model, PROMPT)
    expected = generate(runner, whole)
    runner.execute(leave(30))
    request = replace(entering(runner, whole.placeholders, whole, GREEDY), prompt_embeds=None)
    late = replace(request, prompt_embeds=whole.rest(4))
    assert runner.execute(step(31, 3, 4, late)).token_ids.tolist() == expected[:1]
    runner.execute(leave(32))
    known = np.append(request.token_ids, expected[0]).astype(np.int32)
    assert (
        runner.execute(step(33, 1, 7, replace(request, token_ids=known))).token_ids.tolist()
        == (expected[1:2])
    )
    runner.execute(leave(34))
    with pytest.raises(
        InvalidArgument,
        match=(
            "the embeddings are for tokens 4 to 7, which are not all tokens of the embedded prompt "
            "in row 0 that are still to be computed"
        ),
    ):
        runner.execute(step(35, 4, 3, late))


def leave(number: int) -> StepInput:
    return StepInput(1, number, ints(), ints(), ints(), removed_rows=ints(0))
