"""Figures and errors of `stepwell bench` against a server with known delays."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.cli.__main__ import main
from services.cli.bench.core.result import SCHEMA_VERSION
from tests.plain_http import http_get
from tests.slowness import busy_slowness

ROOT = Path(__file__).parents[3]
SLACK_MS = 30.0
"""Milliseconds that a machine which is neither slow nor busy may add to a latency."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cli.timed_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.terminate()


@pytest.fixture
def bench(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Any]]:
    """A function that runs `stepwell bench`. It returns the exit status and the JSON document (None
    if no document was written).
    """
    for name in [name for name in os.environ if "STEPWELL" in name]:
        monkeypatch.delenv(name)

    def run(model: str, *flags: str) -> tuple[int, Any]:
        file = tmp_path / "run.json"
        status = main(["bench", "--url", url, "--model", model, "--json", str(file), *flags])
        return status, json.loads(file.read_text()) if file.exists() else None

    return run


Bench = Callable[..., tuple[int, Any]]


def log_of(url: str, model: str) -> list[dict[str, Any]]:
    """The server's records of all completions of `model`, including the first ones, by which
    `stepwell bench` tests the server's features.
    """
    notes = http_get(f"{url}/log").json()
    return [note for note in notes if note["body"]["model"] == model]


def millis(before: float, after: float) -> float:
    return (after - before) * 1000


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_latencies_are_those_of_the_server(bench: Bench, url: str, api: str) -> None:
    model = f"ttft=60 itl=12 api={api}"
    status, run = bench(
        *(model, "--api", api, "--num-requests", "6", "--max-concurrency", "2"),
        *("--input-len", "20", "--output-len", "9", "--goodput", "ttft:1000", "e2e:1"),
    )
    assert status == 0
    notes = log_of(url, model)[-6:]
    rows = run["requests"]
    for row in rows:
        assert len(row["itl_ms"]) == 8
    delays = [millis(note["came"], note["wrote"][0]) for note in notes]
    assert min(delays) >= 60
    ttft = run["summary"]["ttft_ms"]
    slack = SLACK_MS * busy_slowness()
    assert statistics.mean(delays) <= ttft["mean"] <= statistics.mean(delays) + slack
    gaps = [millis(before, after) for note in notes for before, after in pairwise(note["wrote"])]
    itl, tpot = run["summary"]["itl_ms"], run["summary"]["tpot_ms"]
    assert itl["mean"] == pytest.approx(statistics.mean(gaps), abs=slack / 10)
    assert tpot["mean"] == pytest.approx(statistics.mean(gaps), abs=slack / 10)
    assert itl["p50"] == pytest.approx(statistics.median(gaps), abs=slack / 8)
    e2el = run["summary"]["e2el_ms"]["mean"]
    assert e2el == pytest.approx(ttft["mean"] + 8 * tpot["mean"], abs=0.1)
    assert run["summary"]["total_output_tokens"] == 54
    assert run["summary"]["total_cached_tokens"] == 12
    assert run["summary"]["request_goodput"] == 0


def test_prompts_have_their_lengths_and_requests_their_fields(bench: Bench, url: str) -> None:
    model = "itl=1 fields"
    status, run = bench(
        *(model, "--num-requests", "5", "--input-len", "30-40", "--output-len", "3"),
        *("--prefix-len", "10", "--extra-body", '{"temperature": 0}', "--header", "X-A: b"),
        *("--api-key", "secret"),
    )
    assert status == 0
    assert run["prompt_lengths"] == {"by": "the server's /tokenize", "tokens_per_word": 1.0}
    assert all(40 <= row["input_tokens"] <= 50 for row in run["requests"])
    note = log_of(url, model)[-1]
    assert note["body"] == {
        "model": model,
        "prompt": note["body"]["prompt"],
        "max_tokens": 3,
        "min_tokens": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    assert (note["headers"]["x-a"], note["headers"]["authorization"]) == ("b", "bearer secret")
    assert "secret" not in json.dumps(run)


def test_the_same_seed_sends_the_same_load(bench: Bench, url: str) -> None:
    def prompts(model: str, *flags: str) -> list[str]:
        assert bench(model, "--num-requests", "4", "--output-len", "1", *flags)[0] == 0
        return [note["body"]["prompt"] for note in log_of(url, model)[-4:]]

    first = prompts("seed a")
    assert prompts("seed b") == first
    assert prompts("seed c", "--seed", "1") != first


def test_an_open_loop_keeps_its_times(bench: Bench, url: str) -> None:
    """Requests are sent every 20 ms, although each answer takes 200 ms."""
    model = "ttft=200 open"
    flags = ("--request-rate", "50", "--burstiness", "inf", "--num-requests", "20")
    status, run = bench(model, *flags, "--output-len", "1")
    assert status == 0
    notes = log_of(url, model)[-20:]
    assert sum(note["came"] < notes[0]["wrote"][0] for note in notes) >= 5
    assert run["summary"]["max_concurrent_requests"] >= 5
    assert all(row["sent"] >= row["intended"] for row in run["requests"])
    assert run["summary"]["schedule_lag_ms"]["p50"] < SLACK_MS
    assert [row["intended"] for row in run["requests"]] == [n / 50 for n in range(20)]


def test_a_limit_of_concurrency_counts_from_the_intended_time(bench: Bench) -> None:
    flags = ("--request-rate", "inf", "--max-concurrency", "1", "--num-requests", "4")
    status, run = bench("ttft=50 limited", *flags, "--output-len", "1")
    assert status == 0
    rows = run["requests"]
    assert all(after["sent"] >= before["ended"] for before, after in pairwise(rows))
    assert all(row["ttft_ms"] >= 50 * place for place, row in enumerate(rows, 1))


def test_a_conversation_has_the_servers_answers(bench: Bench, url: str) -> None:
    model = "itl=1 turns"
    status, run = bench(
        *(model, "--api", "chat", "--turns", "3", "--think-time", "0.05", "--num-requests", "3"),
        *("--input-len", "4", "--output-len", "2"),
    )
    assert status == 0
    messages = log_of(url, model)[-1]["body"]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    assert [m["content"] for m in messages[1::2]] == [" w0 w1"] * 2
    first, second, _ = run["requests"]
    assert second["intended"] == pytest.approx(first["ended"] + 0.05, abs=1e-5)


def test_a_trace_is_sent_at_its_times(bench: Bench, url: str, tmp_path: Path) -> None:
    model = "itl=1 trace"
    lines = [
        {"timestamp": 1000 * n, "input_length": 700, "output_length": 4 + n, "hash_ids": [7, n]}
        for n in range(3)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, run = bench(model, "--trace", str(file), "--time-scale", "0.1")
    assert status == 0
    assert [row["intended"] for row in run["requests"]] == pytest.approx([0, 0.1, 0.2])
    assert [row["input_tokens"] for row in run["requests"]] == [700] * 3
    assert [row["output_tokens"] for row in run["requests"]] == [4, 5, 6]
    prompts = [note["body"]["prompt"].split() for note in log_of(url, model)[-3:]]
    assert prompts[0][:512] == prompts[1][:512] == prompts[2][:512]
    assert prompts[0] != prompts[1]


def test_a_dataset_is_sent_in_its_order(bench: Bench, url: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two"}\n{"prompt": "three", "output_tokens": 2}\n')
    model = "itl=1 dataset"
    flags = ("--dataset", str(file), "--num-requests", "3", "--output-len", "1")
    status, run = bench(model, *flags)
    assert status == 0
    bodies = [note["body"] for note in log_of(url, model)[-3:]]
    assert [body["prompt"] for body in bodies] == ["one two", "three", "one two"]
    assert [row["output_tokens"] for row in run["requests"]] == [1, 2, 1]


def test_an_empty_first_event_is_no_token(bench: Bench) -> None:
    flags = ("--api", "chat", "--num-requests", "2", "--output-len", "2")
    _, run = bench("ttft=50 role-first", *flags)
    assert run["summary"]["ttft_ms"]["min"] >= 50
    assert [len(row["itl_ms"]) for row in run["requests"]] == [1, 1]


def test_tokens_that_come_together_are_events_of_their_own(bench: Bench) -> None:
    _, run = bench("ttft=1 itl=200 pack=2", "--num-requests", "2", "--output-len", "4")
    for row in run["requests"]:
        together, apart, again = row["itl_ms"]
        assert max(together, again) < 100 < apart


def test_an_answer_that_is_not_streamed_has_no_first_token(bench: Bench) -> None:
    _, run = bench("ttft=30 whole", "--no-stream", "--num-requests", "3", "--output-len", "5")
    summary = run["summary"]
    assert (summary["ttft_ms"], summary["tpot_ms"], summary["itl_ms"]) == (None, None, None)
    assert 30 <= summary["e2el_ms"]["min"] <= 30 + SLACK_MS * busy_slowness()
    assert summary["total_output_tokens"] == 15


@pytest.mark.parametrize(
    ("field", "left_out"),
    [
        ("min_tokens", ["min_tokens"]),
        ("ignore_eos", ["min_tokens", "ignore_eos"]),
        ("stream_options", ["min_tokens", "ignore_eos", "stream_usage"]),
    ],
)
def test_a_field_that_the_server_refuses_is_left_out(
    bench: Bench, url: str, field: str, left_out: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    model = f"refuse={field}"
    status, run = bench(model, "--num-requests", "1", "--output-len", "2")
    assert status == 0
    assert run["server"]["left_out"] == left_out
    assert f"the server refuses {', '.join(left_out)}" in capfd.readouterr().err
    assert field not in log_of(url, model)[-1]["body"]


def test_without_usage_events_are_counted(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    _, run = bench("itl=1 usage=no", "--num-requests", "2", "--output-len", "3")
    assert run["summary"]["total_output_tokens"] == 6
    assert run["summary"]["output_tokens_by_usage"] is False
    assert "the server reports no usage" in capfd.readouterr().out


def test_without_a_tokenizer_usage_shows_how_long_words_are(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    status, run = bench("itl=1 tokenize=no", "--num-requests", "2", "--output-len", "1")
    assert status == 0
    assert run["prompt_lengths"] == {"by": "usage, on average", "tokens_per_word": 1.0}
    assert "prompt lengths about right, by usage, on average" in capfd.readouterr().out


def test_a_tokenizer_of_this_machine(bench: Bench) -> None:
    directory = str(ROOT / "models" / "demo")
    flags = ("--tokenizer", directory, "--num-requests", "1", "--output-len", "1")
    status, run = bench("itl=1 tokenize=no local", *flags)
    assert status == 0
    assert run["prompt_lengths"] == {"by": directory, "tokens_per_word": 1.0}


@pytest.mark.parametrize(
    ("model", "kind"), [("error=2", "stream: the worker is away"), ("break=2", "broken")]
)
def test_failures_are_counted_by_kind(
    bench: Bench, model: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server fails after two tokens. The first request, by which `stepwell bench` tests the
    fields that the server accepts, has only two tokens and succeeds.
    """
    flags = ("--num-requests", "2", "--output-len", "5")
    status, run = bench(model, *flags)
    assert status == 1
    assert run["summary"]["failures"] == {kind.partition(":")[0]: 2}
    assert f"2 failed: {kind}" in capfd.readouterr().out


def test_a_server_that_gives_no_token_ends_the_command(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench("silent") == (1, None)
    assert capfd.readouterr().err.startswith(
        "stepwell bench: the test request before the load failed: no output"
    )


def test_one_failure_is_counted_and_sets_the_status(bench: Bench, tmp_path: Path) -> None:
    """The connection breaks after two tokens, so that only longer answers fail."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 2}\n{"prompt": "b", "output_tokens": 3}\n')
    flags = ("--dataset", str(file), "--num-requests", "2")
    status, run = bench("itl=1 break=2 some", *flags)
    assert status == 1
    assert (run["summary"]["completed"], run["summary"]["failed"]) == (1, 1)


def test_a_request_that_takes_too_long_has_failed(bench: Bench) -> None:
    status, run = bench("itl=300", "--timeout", "1", "--num-requests", "1", "--output-len", "9")
    assert status == 1
    assert run["summary"]["failures"] == {"timeout": 1}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--model", "status=429"),
            "the test request before the load failed: http 429: as you wish",
        ),
        (("--trace", "/nowhere"), "cannot read /nowhere: No such file or directory"),
        (("--trace", "x", "--turns", "2"), "--trace and --turns contradict"),
        (("--time-scale", "2"), "--time-scale needs --trace"),
        (("--goodput", "ttft"), "argument --goodput: must be one of ttft, tpot, e2el with"),
        (("--request-rate", "fast"), "argument --request-rate: must be a rate such as 8"),
        (
            ("--request-rate", "2:30,inf", "--duration", "5"),
            "--request-rate inf needs --num-requests",
        ),
        (("--goodput", "ttft:inf"), "argument --goodput: must be one of ttft, tpot, e2el with"),
        (("--extra-body", '{"a": NaN}'), "argument --extra-body: must be a JSON object"),
        (("--input-len", "9-3"), "argument --input-len: must be a range from a smaller"),
        (("--input-len", "0"), "--input-len must be at least 1, and whole"),
        (("--json", "/nowhere/x.json"), "cannot write /nowhere/x.json: its directory"),
        (("--tokenizer", "/nowhere"), "--tokenizer /nowhere holds no tokenizer.json"),
        (("--url", "ftp://x"), "--url ftp://x is not an http:// or https:// address"),
        (("--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    url: str, flags: tuple[str, ...], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", url, *flags]) in (1, 2)
    error = capfd.readouterr().err
    assert error.startswith(f"stepwell bench: {sentence}")
    assert error.count("\n") == 1


def test_the_document_has_a_version_and_every_setting(bench: Bench) -> None:
    _, run = bench("itl=1", "--num-requests", "3", "--num-warmups", "2", "--output-len", "2")
    assert (run["schema"], run["schema_version"]) == ("stepwell-bench", SCHEMA_VERSION)
    assert run["settings"]["num_warmups"] == 2
    assert [row["warmup"] for row in run["requests"]] == [True] * 2 + [False] * 3
    assert run["summary"]["completed"] == 3
    assert 0 < run["generator"]["processor_share"] < 1.5


def test_a_run_is_drawn(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "run.svg"
    flags = ("--num-requests", "8", "--num-warmups", "2", "--output-len", "6", "--plot", str(file))
    assert bench("ttft=5 itl=2", *flags)[0] == 0
    text = "".join(ET.parse(file).getroot().itertext())
    for part in ("TTFT", "ITL", "output tokens/s", "warm-up"):
        assert part in text


def test_an_interrupt_ends_with_what_was_measured(url: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "services.cli", "bench", "--url", url, "--model", "ttft=20"),
            *("--duration", "60", "--max-concurrency", "3", "--output-len", "3"),
            *("--json", str(file)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        deadline = time.monotonic() + 60
        while len(log_of(url, "ttft=20")) < 20:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "completed" in out
    run = json.loads(file.read_text())
    assert run["interrupted"] is True
    assert run["summary"]["completed"] >= 10
    assert run["summary"]["failures"] == {"interrupted": 3}
