"""Faults of a simulated device do not change answers."""

import re
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.inference import generate_all, request
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import Stack
from tests.e2e.tiny import save_servable_model
from tests.plain_http import http_get
from tests.tiny_models import VOCAB_SIZE
from tests.worker.options.simulated.oracle import Oracle

NUM_TOKENS = 60
PROFILE = "kv_cache_memory_bytes = 1_500_000\n[mixed]\nseconds = 0.01\n"
ORACLE = Oracle(VOCAB_SIZE, (2,))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, and a profile."""
    directory: Path = tmp_path_factory.mktemp("faulty")
    save_servable_model(directory)
    (directory / "model.safetensors").unlink()
    (directory / "steps.toml").write_text(PROFILE)
    return directory


@pytest.mark.parametrize(
    ("faults", "num_losses"),
    [
        (
            "at step 10: hang 1 s; at step 20: slow 5x for 1 s; at step 30: refuse memory; "
            "at step 60: hang",
            2,
        ),
        ("rank 1 at step 40: fail", 1),
    ],
)
async def test_answers_are_complete(directory: Path, faults: str, num_losses: int) -> None:
    """Steps are slow, wait or fail, on one rank of two as well, and a device hangs for ever."""
    num_ranks = 2 if "rank" in faults else 1
    flags = (
        *("--device", "simulated", "--profile", str(directory / "steps.toml")),
        *("--device-faults", faults, "--tensor-parallel-size", str(num_ranks)),
    )
    environ = {"STEPWELL_SCHEDULER_STEP_TIMEOUT_SECONDS": "4"}
    with closing(Stack(directory, *flags, environ=environ)) as stack:
        requests = [request(prompt, NUM_TOKENS) for prompt in PROMPTS[:4]]
        answers = await generate_all(stack.grpc, requests)
        for prompt, answer in zip(PROMPTS, answers, strict=False):
            assert answer.token_ids == ORACLE.continuation(prompt, NUM_TOKENS)
        text = http_get(f"{stack.url}/metrics").text
        losses = re.findall(r'^stepwell_recoveries_total{.*?lost="workers?".*?} (\S+)$', text, re.M)
        num_lost = sum(map(float, losses))
        # A rank that restarts may be lost again while the other rank still recovers.
        assert num_lost == num_losses or (num_lost > num_losses and num_ranks > 1)
        stack.wait_until_nothing_is_held()
