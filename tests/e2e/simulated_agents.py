"""Sends turns of agents (requests that continue others) to services on a simulated device."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.stack import Stack
from tests.e2e.tiny import save_servable_model
from tests.plain_http import http_get, http_post
from tests.tiny_models import VOCAB_SIZE
from tests.worker.options.simulated.oracle import Oracle

PROFILE = "kv_cache_memory_bytes = 1_500_000\n[mixed]\nseconds = 0.01\nseconds_per_token = 2e-4\n"
ORACLE = Oracle(VOCAB_SIZE, (2,))


def simulated_stack(directory: Path, *flags: str) -> Stack:
    """The services with a simulated device and the policy `program`. The model's files are saved in
    `directory`.
    """
    save_servable_model(directory)
    (directory / "model.safetensors").unlink()
    (directory / "steps.toml").write_text(PROFILE)
    flags += ("--device", "simulated", "--profile", "steps.toml", "--policy", "program")
    flags += ("--num-blocks", "41", "--max-num-seqs", "4")
    return Stack(directory, *flags, directory=directory)


def turn(
    url: str, context: list[int], headers: dict[str, str] | None = None, **fields: object
) -> tuple[list[int], int]:
    """Sends a turn to a gateway, and checks the answer. `context` are all tokens so far. Returns
    `context` with the answer, and the number of cached prompt tokens.
    """
    body = {"prompt": context, "max_tokens": 12, "return_token_ids": True} | fields
    answer = http_post(f"{url}/v1/completions", json=body, headers=headers).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == ORACLE.continuation(context, 12)
    num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [*context, *choice["token_ids"]], num_cached


def values(stack: Stack, name: str, label: str) -> dict[str, float]:
    """Reads a metric. Maps the values of `label` to the metric's values."""
    text = http_get(f"{stack.url}/metrics").text
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }
