"""Tests Stepwell's scheduler behind smg, a gateway for vLLM, with the `openai` package."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import httpx
import openai
import pytest

from services.cli.processes.ports import claim_port
from tests.e2e.stack import Stack, wait_for

if find_spec("smg") is None:
    pytest.skip("smg is not installed: pip install smg", allow_module_level=True)

MESSAGES = [{"role": "user", "content": "Write a class for a point."}]


@contextmanager
def running_smg(stack: Stack) -> Iterator[str]:
    """Runs smg with the schedulers of the running services, and yields its URL."""
    port, metrics = (claim_port("127.0.0.1", 0, "--port") for _ in range(2))
    url = f"http://127.0.0.1:{port}"
    workers = [f"grpc://{address}" for address in stack.vllm_grpc]
    with tempfile.TemporaryDirectory() as directory, (Path(directory) / "log").open("w+") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1"),
                *("--port", str(port), "--prometheus-port", str(metrics)),
                *("--worker-urls", *workers),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
        try:
            wait_for(lambda: process.poll() is not None or answers(url, stack.model))
            assert process.poll() is None, Path(log.name).read_text()
            yield url
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def smg(demo_stack: Stack) -> Iterator[str]:
    with running_smg(demo_stack) as url:
        yield url


def answers(url: str, model: str) -> bool:
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    try:
        with httpx.Client(verify=False) as http:
            response = http.post(f"{url}/v1/completions", json=body, timeout=60)
            return response.status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def client_of(url: str) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, http_client=http)


@pytest.fixture
def client(smg: str) -> Iterator[openai.OpenAI]:
    with client_of(smg) as client:
        yield client


@pytest.fixture
def ours(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    with client_of(demo_stack.url) as client:
        yield client


def test_chat_says_what_our_gateway_says(
    client: openai.OpenAI, ours: openai.OpenAI, demo_stack: Stack
) -> None:
    for fields in ({"temperature": 0}, {"temperature": 1, "seed": 5, "top_p": 0.75, "n": 2}):
        theirs, wanted = (
            one.chat.completions.create(
                model=demo_stack.model, messages=MESSAGES, max_tokens=24, **fields
            )
            for one in (client, ours)
        )
        assert [(choice.message.content, choice.finish_reason) for choice in theirs.choices] == [
            (choice.message.content, choice.finish_reason) for choice in wanted.choices
        ]
        assert theirs.usage is not None
        assert wanted.usage is not None
        assert theirs.usage.prompt_tokens == wanted.usage.prompt_tokens
        assert theirs.usage.completion_tokens == wanted.usage.completion_tokens


def test_completions_say_what_our_gateway_says(
    client: openai.OpenAI, ours: openai.OpenAI, demo_stack: Stack
) -> None:
    theirs, wanted = (
        one.completions.create(
            model=demo_stack.model, prompt="class Point:", max_tokens=24, temperature=0
        ).choices[0]
        for one in (client, ours)
    )
    assert (theirs.text, theirs.finish_reason) == (wanted.text, wanted.finish_reason)


def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI, demo_stack: Stack) -> None:
    whole = client.chat.completions.create(
        model=demo_stack.model, messages=MESSAGES, max_tokens=40, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model=demo_stack.model,
            messages=MESSAGES,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    (usage,) = (chunk.usage for chunk in chunks if chunk.usage is not None)
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_client_that_disconnects_aborts_its_request(
    client: openai.OpenAI, demo_stack: Stack
) -> None:
    before = int(demo_stack.status()["num_finished"])
    stream = client.chat.completions.create(
        model=demo_stack.model,
        messages=MESSAGES,
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    generated = int(demo_stack.status()["num_generated_tokens"])
    next(iter(stream))
    assert int(demo_stack.status()["num_running"]) == 1
    stream.close()
    wait_for(lambda: int(demo_stack.status()["num_running"]) == 0)
    status = demo_stack.status()
    assert int(status["num_finished"]) == before + 1
    assert int(status["num_generated_tokens"]) < generated + 800


def test_log_probabilities_are_those_of_our_gateway(
    client: openai.OpenAI, ours: openai.OpenAI, demo_stack: Stack
) -> None:
    theirs, wanted = (
        one.chat.completions.create(
            model=demo_stack.model,
            messages=MESSAGES,
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
        .choices[0]
        .logprobs
        for one in (client, ours)
    )
    assert theirs is not None
    assert wanted is not None
    assert theirs.content is not None
    assert wanted.content is not None
    assert [token.logprob for token in theirs.content] == pytest.approx(
        [token.logprob for token in wanted.content]
    )
    assert [top.logprob for token in theirs.content for top in token.top_logprobs] == pytest.approx(
        [top.logprob for token in wanted.content for top in token.top_logprobs]
    )


def test_smg_cuts_the_text_at_a_stop_string(client: openai.OpenAI, demo_stack: Stack) -> None:
    """The scheduler produces tokens, not text, so a flag allows stop strings, which smg applies."""
    whole = client.completions.create(
        model=demo_stack.model, prompt="class Point:", max_tokens=24, temperature=0
    ).choices[0]
    stop = "implements"
    assert stop in whole.text
    cut = client.completions.create(
        model=demo_stack.model, prompt="class Point:", max_tokens=24, temperature=0, stop=stop
    ).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text.partition(stop)[0]


def test_a_prompt_that_was_seen_is_cached(client: openai.OpenAI, demo_stack: Stack) -> None:
    prompt = "a text of some length, which is sent again and again. " * 4
    usages = [
        client.completions.create(model=demo_stack.model, prompt=prompt, max_tokens=1).usage
        for _ in range(2)
    ]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    assert [detail is not None and detail.cached_tokens for detail in details] == [0, 48]


def test_what_is_not_served_is_a_bad_request_that_names_it(
    client: openai.OpenAI, demo_stack: Stack
) -> None:
    with pytest.raises(
        openai.BadRequestError, match="json_schema is not supported by this service"
    ):
        client.chat.completions.create(
            model=demo_stack.model, messages=MESSAGES, response_format={"type": "json_object"}
        )


def test_smg_sends_a_prefix_to_the_replica_that_has_it_cached(demo_replicas: Stack) -> None:
    """smg learns the cached prefixes through SubscribeKvEvents. With random routing, all twelve
    continuations of a round would find their prefixes only in one of 4096 rounds.
    """
    with running_smg(demo_replicas) as url, client_of(url) as client:
        rounds = count()

        def num_cached(prompt: str) -> int:
            answer = client.completions.create(
                model=demo_replicas.model, prompt=prompt, max_tokens=1
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            return 0 if details is None else details.cached_tokens or 0

        def all_are_found() -> bool:
            number = next(rounds)
            prompts = [f"{number} {letter} is the prefix of a document. " * 20 for letter in "abcd"]
            for prompt in prompts:
                num_cached(prompt)
            turns = [f"{prompt} turn {turn}" for turn in range(3) for prompt in prompts]
            return min(map(num_cached, turns)) > 64

        wait_for(lambda: num_workers(url) == 2)
        wait_for(all_are_found)


def num_workers(url: str) -> int:
    """The number of replicas to which smg sends requests."""
    with httpx.Client(verify=False) as http:
        return len(http.get(f"{url}/workers", timeout=60).raise_for_status().json()["workers"])
