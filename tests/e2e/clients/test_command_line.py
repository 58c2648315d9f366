"""Runs `stepwell chat`, `complete` and `status` against all four services."""

import subprocess
import sys

from tests.e2e.stack import ROOT, Stack

LONGEST_LINE = 170


def stepwell(
    stack: Stack, command: str, *arguments: str, stdin: str = "", complaint: str = ""
) -> str:
    """Runs a command, which must write `complaint` to standard error. Returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", command, "--url", stack.url, *arguments],
        input=stdin.encode(),
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.decode().strip()) == (0, complaint)
    return done.stdout.decode()


def test_a_start_is_logged_in_lines_that_can_be_parsed(stack: Stack) -> None:
    ready = next(i for i, line in enumerate(stack.output) if line.startswith("ready: "))
    lines = stack.output[:ready]
    assert max(map(len, lines)) <= LONGEST_LINE
    assert not [line for line in lines if "failed" in line or "No such file" in line]


def test_a_completion_is_the_same_each_time(stack: Stack) -> None:
    flags = ("--max-tokens", "20", "--temperature", "0", "once upon")
    cut = "stopped at max_tokens 20; --max-tokens N allows more"
    first = stepwell(stack, "complete", *flags, complaint=cut)
    assert len(first) > 1
    assert stepwell(stack, "complete", *flags, complaint=cut) == first


def test_each_line_of_a_piped_conversation_is_answered(stack: Stack) -> None:
    answers = stepwell(stack, "chat", "--max-tokens", "5", "--seed", "1", stdin="hello\nagain\n")
    assert answers.count("\n") >= 2


def test_status_counts_what_was_done(stack: Stack) -> None:
    cut = "stopped at max_tokens 3; --max-tokens N allows more"
    stepwell(stack, "complete", "--max-tokens", "3", "x", complaint=cut)
    lines = stepwell(stack, "status").splitlines()
    rows = dict(line.split(maxsplit=1) for line in lines[2:])
    assert lines[0] == f"{stack.model}: 0 requests here"
    assert lines[1].endswith(": idle")
    assert rows["running"] == "0 of 64"
    assert int(rows["generated"].split()[0]) >= 1
