"""The replay of a damaged log ends with one sentence that names the line, without a traceback."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.cli.__main__ import main
from services.cli.replay.log_file import StepLogFile
from services.scheduler.core.step_log.log_entry import TIMED_VERSION, VERSION
from tests.cli.recorded_logs import crowded, record

LOG = record(crowded(5)).text().encode()
KINDS = {json.loads(line).get("call", "header"): n for n, line in enumerate(LOG.splitlines())}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def replay(
    capsys: pytest.CaptureFixture[str], path: Path, content: bytes, *options: str
) -> tuple[int, str, str]:
    path.write_bytes(content)
    status = main(["replay", str(path), *options])
    return status, *capsys.readouterr()


def expect_one_sentence(path: Path, status: int, out: str, err: str) -> None:
    """Asserts that a replay found no difference, or some, or failed with a one-line error."""
    if err:
        assert status == 1
        assert err.startswith(f"stepwell replay: {path} ")
        assert " line " in err
        assert err.count("\n") == 1
        assert "0 differences" not in out
    else:
        assert (status == 0) == ("0 differences" in out)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The content `whole` with one damage: cut off, or with a changed byte, digit or line."""
    lines = whole.splitlines(keepends=True)
    where = draw(st.integers(0, len(whole) - 1))
    line = draw(st.integers(0, len(lines) - 1))
    match draw(st.sampled_from(["cut", "byte", "digit", "gone", "twice", "swapped"])):
        case "cut":
            return whole[:where]
        case "byte":
            other = draw(st.binary(min_size=1, max_size=1))
            return whole[:where] + other + whole[where + 1 :]
        case "digit":
            digits = [index for index, byte in enumerate(whole) if chr(byte).isdigit()]
            where = digits[where % len(digits)]
            return (
                whole[:where]
                + draw(st.sampled_from([b"9", b"0", b"-1", b"7e7"]))
                + whole[where + 1 :]
            )
        case "gone":
            del lines[line]
        case "twice":
            lines.insert(line, lines[line])
        case _:
            lines[line], lines[line - 1] = lines[line - 1], lines[line]
    return b"".join(lines)


HARD = settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_a_log_is_replayed_up_to_its_damage(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    lines = LOG.splitlines(keepends=True)
    plans = [number for number, line in enumerate(lines) if b'"schedule"' in line]
    third = plans[2]
    lines[third] = b"damaged\n"
    path = folder / "damaged.jsonl"
    status, out, err = replay(capsys, path, b"".join(lines), "--set", "max_num_seqs=1")
    assert status == 1
    assert err.startswith(f"stepwell replay: {path} line {third + 1}")
    assert "no difference in the 2 steps before the damage" in out
    assert "0 differences" not in out
    assert "what if" in out


@HARD
@given(content=damaged(LOG))
def test_a_damaged_log_ends_the_replay_with_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, content: bytes
) -> None:
    path = folder / "steps.jsonl"
    expect_one_sentence(path, *replay(capsys, path, content, "--set", "max_num_seqs=2"))


@HARD
@given(content=damaged(zstandard.compress(LOG)))
def test_a_damaged_compressed_log_ends_the_replay_with_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, content: bytes
) -> None:
    path = folder / "steps.jsonl.zst"
    expect_one_sentence(path, *replay(capsys, path, content))


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_cut_within_a_line_is_replayed_up_to_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    """A full disk or a killed service leaves such a log."""
    lines = LOG.splitlines(keepends=True)
    number = KINDS[kind]
    num_steps = sum(json.loads(line).get("call") == "schedule" for line in lines[:number])
    for keep in (1, len(lines[number]) // 2, len(lines[number]) - 1):
        content = b"".join(lines[:number]) + lines[number][:keep]
        path = tmp_path / "steps.jsonl"
        status, out, err = replay(capsys, path, content)
        if kind == "header":
            assert status == 1
            assert err == f"stepwell replay: {path} line 1 is cut off: there is no header\n"
            continue
        assert (status, err) == (0, "")
        early = f"the log ends early, within line {number + 1}, after {num_steps} steps: "
        assert early in out
        assert out.endswith("0 differences\n")


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 1))
def test_a_compressed_log_is_replayed_up_to_where_it_was_cut(share: float) -> None:
    """The log is compressed in frames. The replay reads all complete frames before the cut."""
    lines = LOG.splitlines(keepends=True)
    frames = [zstandard.compress(b"".join(lines[at : at + 5])) for at in range(0, len(lines), 5)]
    content = b"".join(frames)
    cut = len(frames[0]) + int(share * (len(content) - len(frames[0])))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "steps.jsonl.zst"
        path.write_bytes(content[:cut])
        read = [line.entry.value for line in StepLogFile(path)]
    num_whole = sum(len(b"".join(frames[:end])) <= cut for end in range(1, len(frames) + 1))
    assert len(read) >= min(5 * num_whole, len(lines)) - 1
    assert read == [json.loads(line) for line in lines[1 : len(read) + 1]]


@pytest.mark.parametrize(
    ("call", "field", "value", "complaint"),
    [
        ("add", "max_tokens", 0, "max_tokens must be a whole number from 1 to 2147483647, not 0"),
        ("add", "tokens", [1, "2"], "tokens[1] must be a whole number from 0"),
        ("add", "tokens", [], "tokens must hold 1 to 59 tokens, not []"),
        ("add", "key", None, "key must be a whole number from 1"),
        (
            "add",
            "repetition_detection",
            [3, 1],
            "repetition_detection must be two sizes and a count, not [3, 1]",
        ),
        (
            "add",
            "repetition_detection",
            [3, 1, 1],
            "repetition_detection must describe a repetition (repetition_detection.min_count is 1",
        ),
        (
            None,
            "version",
            1,
            f"version must be {VERSION} or {TIMED_VERSION}: logs of other versions mean something",
        ),
        ("abort", "key", 99, "key must be of a request that has not ended, not 99"),
        ("abort", "reason", "boredom", "reason must be one of stop, length, abort, nan"),
        ("update_from_output", "step", 7000, "step must be a step in flight, not 7000"),
        ("update_from_output", "token_ids", [], "token_ids must list tokens of"),
        ("update_from_output", "nan_requests", [9], "nan_requests[0] must be a whole number"),
    ],
)
def test_a_line_that_makes_no_sense_is_named_with_its_field(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    call: str | None,
    field: str,
    value: Any,
    complaint: str,
) -> None:
    entries = [json.loads(line) for line in LOG.splitlines()]
    number = next(n for n, entry in enumerate(entries) if entry.get("call") == call)
    entries[number][field] = value
    path = tmp_path / "steps.jsonl"
    content = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    status, _, err = replay(capsys, path, content)
    assert status == 1
    assert err.startswith(f"stepwell replay: {path} line {number + 1}: {complaint}")
    assert err.count("\n") == 1
