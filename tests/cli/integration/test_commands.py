"""The client commands of `stepwell`, as processes that call a real HTTP server."""

import io
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from services.cli import status
from services.cli.__main__ import main
from tests.cli.small_server import SmallServer, small_server

ROOT = Path(__file__).parents[3]


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with small_server() as running:
        yield running


def stepwell(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if "STEPWELL" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        cwd=ROOT,
        env=environ,
        timeout=60,
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def assert_refused(
    done: subprocess.CompletedProcess[str], sentence: str, exit_status: int = 1
) -> None:
    assert done.stderr == sentence + "\n"
    assert done.returncode == exit_status


def test_help_lists_the_commands() -> None:
    for arguments in ([], ["--help"]):
        done = stepwell(*arguments)
        assert done.returncode == 0
        assert all(name in done.stdout for name in ("up", "chat", "complete", "status"))


def test_the_version_is_one_line() -> None:
    done = stepwell("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("stepwell 0.")


def test_an_unknown_command_is_one_sentence() -> None:
    assert_refused(
        stepwell("serve"),
        "stepwell: there is no command 'serve'; the commands are up, chat, complete, keys, "
        "status, top, trace, admin, bench, deploy, replay, simulate, profile, explore, doctor",
        2,
    )


def test_an_unknown_flag_is_one_sentence() -> None:
    assert_refused(
        stepwell("chat", "--max-token", "9"),
        "stepwell chat: unrecognized arguments: --max-token; similar are --max-tokens, --api-key",
        2,
    )


def test_a_bad_flag_value_is_one_sentence() -> None:
    assert_refused(
        stepwell("complete", "--top-k", "many", "x"),
        "stepwell complete: argument --top-k: invalid int value: 'many'",
        2,
    )


def test_a_completion_streams_with_its_parameters(server: SmallServer) -> None:
    done = stepwell(
        *("complete", "--url", server.url, "--max-tokens", "5", "--temperature", "0"),
        *("--stop", "a", "--stop", "b", "--api-key", "secret", "größer als"),
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "größer.als.\n"
    assert server.bodies == [
        {
            "model": "small",
            "prompt": "größer als",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "temperature": 0,
            "stop": ["a", "b"],
        }
    ]
    assert server.keys == ["Bearer secret"] * 2


def test_a_completion_of_standard_input(server: SmallServer) -> None:
    done = stepwell("complete", "--url", server.url, "--model", "m", "--echo", stdin="a b")
    assert done.stdout == "a ba.b.\n"
    assert server.bodies[0]["model"] == "m"


def test_a_chat_message_of_the_command_line_is_answered_and_the_chat_ends(
    server: SmallServer,
) -> None:
    done = stepwell("chat", "--url", server.url, "--system", "be brief", "hello")
    assert (done.returncode, done.stdout) == (0, "[be brief hello]\n")


def test_a_piped_chat_is_one_conversation(server: SmallServer) -> None:
    done = stepwell("chat", "--url", server.url, stdin="one\n\ntwo\n/reset\nthree\n/quit\nfour\n")
    assert done.stdout == "[one]\n[one [one] two]\n[three]\n"


def test_a_refused_parameter_is_the_servers_sentence(server: SmallServer) -> None:
    assert_refused(
        stepwell("complete", "--url", server.url, "--top-k", "-1", "refuse"),
        "stepwell complete: top_k must be at least 0",
    )


def test_an_error_in_the_stream_is_one_sentence(server: SmallServer) -> None:
    done = stepwell("complete", "--url", server.url, "fail")
    assert_refused(done, "stepwell complete: the worker is away")


def test_an_answer_that_breaks_off_is_an_error(server: SmallServer) -> None:
    done = stepwell("complete", "--url", server.url, "break")
    assert_refused(done, "stepwell complete: the connection ended before the answer was complete")


def test_an_empty_prompt_is_refused(server: SmallServer) -> None:
    done = stepwell("complete", "--url", server.url)
    assert_refused(done, "stepwell complete: the prompt is empty")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "has_colours"), [("", True), ("1", False)])
def test_no_color_switches_colours_off(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch, no_color: str, *, has_colours: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    assert status.main(["--url", server.url]) == 0
    assert (re.search(r"\x1b\[[\d;]*\b3\dm", terminal.getvalue()) is not None) is has_colours


def test_control_characters_in_an_answer_do_not_reach_the_terminal(
    server: SmallServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.model = "sm\x1b[2Jall\x9b5m \u2713\n"
    assert status.main(["--url", server.url]) == 0
    assert capsys.readouterr().out == "sm\ufffd[2Jall\ufffd5m \u2713\ufffd: 0 requests here\n"


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_control_characters_of_a_model_reach_a_pipe_only(
    server: SmallServer, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "a\x1b]0;title\x07\r\n\tb\x9b5m\u2713"
    monkeypatch.setattr(SmallServer, "answer", answer)
    assert stepwell(command, "hello", "--url", server.url).stdout == answer + "\n"
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert import_module(f"services.cli.{command}").main(["hello", "--url", server.url]) == 0
    assert terminal.getvalue() == "a\ufffd]0;title\ufffd\n\tb\ufffd5m\u2713\n"


def test_control_characters_in_an_error_do_not_reach_the_terminal(server: SmallServer) -> None:
    done = stepwell("complete", "fail\x1b[2J", "--url", server.url)
    assert_refused(done, "stepwell complete: the worker is away\ufffd[2J")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("complete", "--temperature", "nan"), "argument --temperature: must be a number, not 'n"),
        (("chat", "--top-p", "high"), "argument --top-p: must be a number, not 'high'"),
        (("status", "--interval-seconds", "inf"), "--interval-seconds must be above 0, and a day"),
        (("top", "--interval-seconds", "0"), "--interval-seconds must be above 0, and a day"),
        (("status", "--api-key", "k\u00e9y"), "argument --api-key: must be printable ASCII"),
        (("trace", "--api-key", "a\nb"), "argument --api-key: must be printable ASCII"),
        (("admin", "resume", "--admin-key", "a\nb"), "argument --admin-key: must be printable"),
        (("simulate", "--json", "/nowhere/x"), "cannot write /nowhere/x: its directory"),
        (("simulate", "--plot", "/dev/null"), "--plot /dev/null: File exists"),
        (("profile", "--model", "x", "--output", "/nowhere/x"), "cannot write /nowhere/x: its"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stepwell {arguments[0]}: {sentence}")
    assert error.count("\n") == 1


def test_the_line_break_after_a_key_is_not_part_of_it(
    server: SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets of Kubernetes and files often end with a line break."""
    monkeypatch.setenv("STEPWELL_API_KEY", "sk-a\n")
    assert main(["status", "--url", server.url]) == 0
    assert server.keys == ["Bearer sk-a"]


def test_input_that_is_no_text_is_refused(server: SmallServer) -> None:
    done = stepwell("complete", "--url", server.url, stdin=b"\xff\xfe")
    assert_refused(done, "stepwell complete: the input is not UTF-8 text")


@pytest.mark.parametrize("command", [["chat", "hi"], ["complete", "x"], ["status"]])
def test_a_server_that_is_away_is_one_sentence(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert_refused(
        stepwell(*command, "--url", f"http://127.0.0.1:{port}"),
        f"stepwell {command[0]}: no server answers at http://127.0.0.1:{port}; "
        "is `stepwell up` running there?",
    )


def test_operators_calls_without_their_port_are_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert_refused(
        stepwell("admin", "pause", "--url", url),
        f"stepwell admin: no server answers at {url}; "
        "is `stepwell up --admin-port 8001` running there?",
    )


def test_a_call_that_must_name_a_replica_says_so() -> None:
    assert_refused(
        stepwell("admin", "drain"),
        "stepwell admin: drain needs --replica ADDRESS, as `stepwell status` names it",
        2,
    )


@pytest.mark.parametrize("url", ["ftp://host", "host", "http://"])
def test_what_is_no_url_is_one_sentence(url: str) -> None:
    done = stepwell("chat", "--url", url, "hi")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert url in done.stderr


@pytest.fixture
def sigint_as_in_a_terminal() -> Iterator[None]:
    """Makes child processes handle SIGINT even if a shell runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_as_in_a_terminal")
def test_a_conversation_in_a_terminal(server: SmallServer) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli", "chat", "--url", server.url],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(slave)
    try:
        assert "Talking with small." in read_until(master, "> ")
        os.write(master, b"hello\n")
        assert "[hello]" in read_until(master, "]\r\n> ")
        os.write(master, b"wait\n")
        read_until(master, "[hello [hello] wait")
        # If a signal arrives just before a system call, Python handles it only after the call. So
        # the signal is sent until it has an effect.
        process.send_signal(signal.SIGINT)
        while not shows(master, 5):
            process.send_signal(signal.SIGINT)
        read_until(master, " (stopped)\r\n> ")
        assert server.hung_up.wait(20)
        os.write(master, b"/nothing\n")
        assert "there are /reset and /quit" in read_until(master, "quit.\r\n> ")
        os.write(master, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def shows(terminal: int, seconds: float) -> bool:
    return bool(select.select([terminal], [], [], seconds)[0])


def read_until(terminal: int, ending: str) -> str:
    """The output of a terminal up to `ending`."""
    shown, deadline = "", time.monotonic() + 60
    while not shown.endswith(ending):
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, shown
        shown += os.read(terminal, 4096).decode()
    return shown


def test_a_watched_status_goes_on_when_the_server_is_back() -> None:
    with small_server() as first:
        port = first.server_address[1]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.cli", "status", "--watch"),
                *("--interval-seconds", "0.05", "--url", first.url),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "small: 0 requests here\n"
    try:
        line = process.stdout.readline()
        while line == "small: 0 requests here\n":
            line = process.stdout.readline()
        assert line.endswith("; asking again\n")
        with small_server(port):
            assert process.stdout.readline() == "small: 0 requests here\n"
    finally:
        process.kill()
        process.communicate()
