"""The output of `stepwell up`."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.console import Console, shows_colour
from services.cli.processes.plan import Addresses
from services.cli.up import ready_text


def shown(*, colour: bool = False, quiet: bool = False, raw: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(stream, colour=colour, quiet=quiet, raw=raw)
    console.line("worker", "loading")
    console.ready("worker", 1.25, 0)
    console.died("worker", "killed by SIGKILL", ["first", "last"], 0.1, 1)
    console.ready("worker", 2.0, 1)
    console.hung("worker", "the process was stopped 1.1 s ago")
    console.died("worker", "killed by SIGKILL", [], 0.2, 2)
    return stream.getvalue().splitlines()


def test_every_line_begins_with_its_service() -> None:
    assert shown() == [
        "worker    | loading",
        "up        | worker is ready after 1.2 s",
        "up        | worker died: killed by SIGKILL; starting it again in 0.1 s",
        "up        |   last lines of worker: first",
        "up        |   last lines of worker: last",
        "up        | worker is ready again (restart 1) after 2.0 s",
        "up        | worker is killed: the process was stopped 1.1 s ago",
        "up        | worker died: killed by SIGKILL, 2 times in a row; starting it again in 0.2 s",
    ]


def test_a_longer_name_widens_the_column() -> None:
    stream = io.StringIO()
    console = Console(stream, colour=True, quiet=False, raw=False, name_width=len("scheduler-0"))
    console.line("kvpool-0", "loading")
    assert stream.getvalue() == "\033[35mkvpool-0    | \033[0mloading\n"


def test_a_terminal_gets_colours() -> None:
    assert shown(colour=True)[0] == "\033[32mworker    | \033[0mloading"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "colour"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colours_are_for_terminals_and_can_be_switched_off(
    stream: io.StringIO, environ: dict[str, str], *, colour: bool
) -> None:
    assert shows_colour(stream, environ) is colour


def test_quiet_leaves_what_goes_wrong() -> None:
    assert shown(quiet=True) == shown()[2:]


def test_lines_for_programs_have_the_name_of_their_service() -> None:
    stream = io.StringIO()
    console = Console(stream, colour=False, quiet=False, raw=True)
    console.line("worker-1", '{"service": "worker", "message": "loading"}')
    named = {"process": "worker-1", "service": "worker", "message": "loading"}
    assert json.loads(stream.getvalue()) == named


def test_other_lines_are_not_touched_for_programs() -> None:
    first, *own = shown(raw=True)
    assert first == "loading"
    lines = [json.loads(line) for line in own]
    assert [(line["level"], line["message"]) for line in lines[:2]] == [
        ("info", "worker is ready after 1.2 s"),
        ("warning", "worker died: killed by SIGKILL; starting it again in 0.1 s"),
    ]


def test_a_reader_that_left_does_not_end_the_supervisor() -> None:
    stream = io.StringIO()
    stream.close()
    Console(stream, colour=False, quiet=False, raw=False).warn("not read")


def test_the_ready_line_has_addresses_and_a_command_to_try(tmp_path: Path) -> None:
    addresses = Addresses("0.0.0.0", 8000, 9000, tmp_path)
    first, second = ready_text(addresses, "it's", needs_key=True).splitlines()
    assert first == "ready: it's at http://127.0.0.1:8000 (gRPC at 127.0.0.1:9000); try"
    assert second.startswith(
        "  curl -N http://127.0.0.1:8000/v1/completions -H 'Authorization: Bearer KEY' "
    )
    assert '"model": "it\'"\'"\'s"' in second


def test_another_address_is_exported_for_the_other_commands(tmp_path: Path) -> None:
    addresses = Addresses("127.0.0.1", 8010, 9000, tmp_path)
    text = ready_text(addresses, "m", needs_key=False)
    assert text.splitlines()[2:] == ["  export STEPWELL_URL=http://127.0.0.1:8010"]


def test_the_ready_line_with_tls(tmp_path: Path) -> None:
    addresses = Addresses("0.0.0.0", 8000, 9000, tmp_path)
    text = ready_text(addresses, "m", needs_key=False, has_tls=True, needs_certificate=True)
    first, second, _ = text.splitlines()
    assert first == "ready: m at https://127.0.0.1:8000 (gRPC at 127.0.0.1:9000); try"
    assert second.startswith(
        "  curl -N https://127.0.0.1:8000/v1/completions --cacert CA.pem "
        "--cert CLIENT.pem --key CLIENT-KEY.pem -H 'Content-Type: application/json'"
    )


class FullDisk(io.RawIOBase):
    """A file on a disk that has space for `room` more bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.room = 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(content)[: self.room]
        self.written += taken
        self.room -= len(taken)
        return len(taken)


def test_lines_that_a_full_disk_did_not_take_are_counted_once_there_is_room() -> None:
    disk = FullDisk()
    stream = io.TextIOWrapper(disk, line_buffering=True)  # type: ignore[type-var]
    console = Console(stream, colour=False, quiet=False, raw=False)
    disk.room = 30
    for number in range(4):
        console.line("worker", f"line {number}")
    disk.room = 1_000
    console.line("worker", "line 4")
    console.line("worker", "line 5")
    assert disk.written.decode().splitlines() == [
        "worker    | line 0",
        "worker    |",
        "up        | 3 lines before this one could not be written: No space left on device",
        "worker    | line 4",
        "worker    | line 5",
    ]
