"""`stepwell complete` reports why an answer ended early, and which flags make answers random."""

import argparse

import pytest

from services.cli.arguments import add_sampling, sampling_body
from services.cli.complete import why_it_stopped


@pytest.mark.parametrize(
    ("reason", "num_tokens", "asked", "note"),
    [
        ("stop", 3, None, None),
        ("length", 16, None, "stopped at max_tokens 16; --max-tokens N allows more"),
        ("length", 5, 5, "stopped at max_tokens 5; --max-tokens N allows more"),
        ("length", 7, 50, "stopped after 7 tokens, at the server's longest sequence"),
        ("length", None, None, "stopped at max_tokens; --max-tokens N allows more"),
        (None, None, None, None),
    ],
)
def test_why_an_answer_stopped(
    reason: str | None, num_tokens: int | None, asked: int | None, note: str | None
) -> None:
    assert why_it_stopped(reason, num_tokens, asked) == note


@pytest.mark.parametrize(("temperature", "is_high"), [("2", False), ("9", True)])
def test_a_high_temperature_gets_a_warning(
    temperature: str, is_high: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    body = sampling_body(parser.parse_args(["--temperature", temperature]))
    assert body == {"temperature": float(temperature)}
    assert ("a temperature of 9 makes answers almost random" in capsys.readouterr().err) is is_high
