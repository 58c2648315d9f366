"""All features together: seeded requests with structured outputs, drafts from suffix trees and an
adapter, on 4-bit weights and two ranks that compare their tokens at every step. Each answer must
equal the answer to the same request sent alone to one rank without drafts.
"""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.stack import Stack
from tests.e2e.tiny import save_servable_model
from tests.lora_adapters import CONFIGS, save_adapter
from tests.plain_http import async_http_client, http_get, http_post
from tests.quantized_checkpoints import FORMATS, save_quantized
from tests.structured_forms import FORMS

NAME = "everywhere"
SPECULATION = '{"method": "suffix", "num_speculative_tokens": 5, "num_rows": 0}'
PIECES_BEFORE_KILL = 5
NUM_TOKENS = 60
COUNTER = r"^vllm:{}_total{{(?![^}}]*position)[^}}]*}} (\S+)$"


@dataclass(frozen=True)
class Composed:
    """A server with all features. `alone` has the answers of one rank without drafts."""

    stack: Stack
    alone: list[str]

    def count(self, name: str) -> float:
        """The current value of a counter of the services."""
        text = http_get(f"{self.stack.url}/metrics").text
        return sum(map(float, re.findall(COUNTER.format(name), text, re.MULTILINE)))


def requests() -> list[dict[str, Any]]:
    """Requests with every kind of structured output, long and repeated, to cause preemptions."""
    first = ["person", "tree", "phone", "choices", "person", "tree", "phone"]
    return [
        {
            "model": NAME,
            "prompt": f"request {seed}: " + "again and " * 6,
            "max_tokens": 150,
            "temperature": 0.8,
            "seed": seed,
            "structured_outputs": FORMS[form].sent,
        }
        for seed, form in enumerate([*first, *(name for name in FORMS if name not in first)])
    ]


async def answered(stack: Stack, wanted: list[dict[str, Any]], victim: str = "") -> list[str]:
    """Sends requests at once, and returns the texts of the answers. If a service `victim` is given,
    it is killed when the first answer has begun.
    """
    killed = False

    async def stream(body: dict[str, Any]) -> str:
        nonlocal killed
        texts = []
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == httpx.codes.OK
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                texts.append(piece["choices"][0]["text"])
                if victim and not killed and len(texts) == PIECES_BEFORE_KILL:
                    killed = True
                    stack.hit(victim, signal.SIGKILL)
        return "".join(texts)

    async with async_http_client(base_url=stack.url, timeout=100) as http:
        texts = await asyncio.gather(*map(stream, wanted))
    assert killed == bool(victim)
    return texts


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    directory = tmp_path_factory.mktemp("composed")
    save_servable_model(directory / "plain")
    save_quantized(directory / "plain", directory / "int4", FORMATS["gptq"])
    adapter = save_adapter(directory / "plain", directory / "adapter", 3, **CONFIGS[NAME])
    flags = (
        *("--dtype", "float32", "--enable-lora", "--lora-modules", f"{NAME}={adapter}"),
        *("--max-model-len", "256"),
    )
    model: Path = directory / "int4"
    with closing(Stack(model, *flags, "--num-blocks", "400")) as stack:
        alone = [text for one in requests() for text in asyncio.run(answered(stack, [one]))]
    ranks = ("--tensor-parallel-size", "2", "--num-blocks", "32")
    drafts = ("--speculative-config", SPECULATION)
    checks = {"STEPWELL_WORKER_CHECK_RANKS_EVERY_STEPS": "1"}
    with closing(Stack(model, *flags, *ranks, *drafts, environ=checks)) as stack:
        yield Composed(stack, alone)


async def test_together_drafted_and_preempted(composed: Composed) -> None:
    assert len(set(composed.alone)) > 1
    assert await answered(composed.stack, requests()) == composed.alone
    assert composed.count("num_preemptions") > 0
    assert composed.count("spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("victim", ["worker-1", "scheduler"])
async def test_when_a_service_is_killed(composed: Composed, victim: str) -> None:
    pid = composed.stack.pids()[victim]
    assert await answered(composed.stack, requests(), victim) == composed.alone
    composed.stack.wait_until_back(victim, pid)


def test_answers_of_another_salt_serve_no_drafts(composed: Composed) -> None:
    body = {"model": composed.stack.model, "prompt": "one two three four", "temperature": 0}
    accepted, texts = [], set()
    for salt in ("ann", "ben", "ann"):
        before = composed.count("spec_decode_num_accepted_tokens")
        changes = {"cache_salt": salt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = http_post(f"{composed.stack.url}/v1/completions", json=body | changes, timeout=60)
        assert answer.status_code == 200, answer.text
        texts.add(answer.json()["choices"][0]["text"])
        accepted.append(composed.count("spec_decode_num_accepted_tokens") - before)
    assert len(texts) == 1
    first, other, again = accepted
    assert other < first + NUM_TOKENS / 6
    assert again > first + NUM_TOKENS / 3
