"""With a seed, sampled output does not depend on how a request is served."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.common.request.sampling import SamplingParams
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.worker.runner_driver import GREEDY, Driver, Request, build_runner

NUM_BLOCKS = 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, "llama")
    return directory


def driver(directory: Path, block_size: int = 16) -> Driver:
    runner = build_runner(directory, block_size=block_size, num_blocks=NUM_BLOCKS)
    return Driver(runner, block_size=block_size, num_blocks=NUM_BLOCKS)


def sampled_requests() -> list[Request]:
    random = np.random.default_rng(11)
    return [
        Request(
            random.integers(3, VOCAB_SIZE, 5 + 7 * number).tolist(),
            12,
            SamplingParams(
                temperature=0.8 + 0.1 * number,
                top_k=(0, 20)[number % 2],
                top_p=(1.0, 0.9, 0.8)[number % 3],
                repetition_penalty=(1.0, 1.2)[number % 2],
                presence_penalty=(0.0, 0.5)[number // 4],
                seed=1000 + number,
            ),
        )
        for number in range(8)
    ]


def test_seeded_output_does_not_depend_on_how_it_is_served(directory: Path) -> None:
    alone, together, chunked, preempted = (sampled_requests() for _ in range(4))
    for request in alone:
        driver(directory).run([request])
    driver(directory).run(together)
    driver(directory, block_size=4).run(chunked, chunk=7)
    shaky, step = driver(directory), 0
    while running := [request for request in preempted if not request.finished]:
        shaky.step([(r, min(30, len(r.tokens) - r.num_computed)) for r in running])
        step += 1
        for number, request in enumerate(running):
            if request.finished or (step + number) % 7 == 0:
                shaky.remove(request)
    outputs = [request.output for request in alone]
    assert len({tuple(output) for output in outputs}) == len(outputs)
    for served in (together, chunked, preempted):
        assert [request.output for request in served] == outputs


def test_another_seed_gives_another_output(directory: Path) -> None:
    first, second = Request([5, 6, 7], 12, SamplingParams(seed=1)), Request([5, 6, 7], 12)
    second.sampling = SamplingParams(seed=2)
    driver(directory).run([first, second])
    assert first.output != second.output


def test_prompt_and_sampled_logprobs_equal_transformers(directory: Path, tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "llama")
    prompt = np.random.default_rng(5).integers(3, VOCAB_SIZE, 40).tolist()
    request = Request(prompt, 3, SamplingParams(temperature=0, logprobs=4, prompt_logprobs=2))
    serving = driver(directory)
    prompt_rows, sampled_rows = [], []
    while not request.finished:
        count = min(7, len(request.tokens) - request.num_computed)
        output = serving.step([(request, count)])
        if (found := output.logprobs.get(0)) is not None:
            prompt_rows += [found.prompt] if found.prompt is not None else []
            sampled_rows += [found.sampled] if found.sampled is not None else []
    with torch.inference_mode():
        expected = reference(torch.tensor([request.tokens])).logits[0].log_softmax(-1)

    tokens = np.concatenate([rows.token_ids for rows in prompt_rows])
    assert tokens[:, 0].tolist() == prompt[1:]
    assert tokens[:, 1:].tolist() == expected[:39].topk(2).indices.tolist()
    np.testing.assert_allclose(
        np.concatenate([rows.logprobs for rows in prompt_rows]),
        expected[:39].gather(1, torch.from_numpy(tokens.astype(np.int64))).numpy(),
        atol=1e-4,
    )
    tokens = np.concatenate([rows.token_ids for rows in sampled_rows])
    assert tokens[:, 0].tolist() == request.output
    assert tokens[:, 1:].tolist() == expected[39:42].topk(4).indices.tolist()
    assert [rows.ranks.tolist() for rows in sampled_rows] == [[1], [1], [1]]


def test_greedy_is_not_changed_by_neighbours_that_sample(directory: Path) -> None:
    alone, among = Request([9, 8, 7], 12), Request([9, 8, 7], 12)
    driver(directory).run([alone])
    driver(directory).run([*sampled_requests(), among])
    assert among.sampling is GREEDY
    assert among.output == alone.output
