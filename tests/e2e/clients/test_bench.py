"""Runs `stepwell bench` against all four services with the demo model."""

import json
from pathlib import Path

import pytest

from services.cli.__main__ import main
from tests.e2e.stack import Stack


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_conversations_with_shared_prefixes(demo_stack: Stack, api: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    status = main(
        [
            *("bench", "--url", f"{demo_stack.url}/v1", "--api", api, "--json", str(file)),
            *("--num-requests", "12", "--num-warmups", "4", "--max-concurrency", "4"),
            *("--input-len", "40", "--output-len", "16", "--prefix-len", "96"),
            *("--num-prefixes", "2", "--turns", "2", "--goodput", "e2el:60000"),
        ]
    )
    assert status == 0
    run = json.loads(file.read_text())
    assert run["server"]["left_out"] == []
    assert run["prompt_lengths"] == {"by": "the server's /tokenize", "tokens_per_word": 1.0}
    summary = run["summary"]
    assert (summary["completed"], summary["failed"]) == (12, 0)
    assert summary["total_output_tokens"] == 12 * 16
    assert summary["output_tokens_by_usage"] is True
    assert summary["total_cached_tokens"] > 0
    assert summary["request_goodput"] == pytest.approx(summary["request_throughput"])
    rows = run["requests"]
    if api == "completions":
        assert {row["input_tokens"] for row in rows if row["turn"] == 0} == {96 + 40}
    for row in rows:
        assert 0 < row["ttft_ms"] <= row["e2el_ms"]
