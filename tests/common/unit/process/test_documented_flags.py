"""documented_flags.md has an example of every flag of every program, and the program accepts it."""

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli.__main__ import COMMANDS, main
from services.cli.errors import CommandParser
from services.cli.settings import UpSettings
from services.common.process.settings import IsDataclass, flag_name, parse_settings
from services.download.settings import DownloadSettings
from services.gateway.settings import GatewaySettings
from services.kvpool.settings import KVPoolSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings

PAGE = Path(__file__).parent / "documented_flags.md"
PROGRAMS: dict[str, type[IsDataclass]] = {
    "python -m services.gateway": GatewaySettings,
    "python -m services.scheduler": SchedulerSettings,
    "python -m services.kvpool": KVPoolSettings,
    "python -m services.worker": WorkerSettings,
    "stepwell up": UpSettings,
    "python -m services.download": DownloadSettings,
}
DIRECTORIES = ("models/tiny", "tls")
FILES = (
    *("tls/node.pem", "tls/node.key", "tls/ca.pem"),
    *("tls/edge.pem", "tls/edge.key", "tls/clients.pem", "keys.txt", "models.json"),
)
"""Files that the examples name. They must exist."""


def commands() -> dict[str, list[str]]:
    """Maps each service on the page, and `stepwell up`, to the arguments of its example."""
    found = {}
    for block in re.findall(r"^```\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        command = block.replace("\\\n", " ")
        program = next((name for name in PROGRAMS if command.startswith(name)), None)
        if program is not None:
            found[program] = shlex.split(command.removeprefix(program))
    return found


def client_commands() -> dict[str, list[list[str]]]:
    """Maps each other command of `stepwell` to the argument lists of its examples."""
    found: dict[str, list[list[str]]] = {}
    block = PAGE.read_text().rpartition("## The other commands")[2].partition("```\n")[2]
    for line in block.partition("```")[0].replace("\\\n", " ").splitlines():
        _, command, *arguments = shlex.split(line)
        found.setdefault(command, []).append(arguments)
    return found


class Parsed(Exception):
    """Raised to end a command after it has parsed its arguments."""


def test_every_program_has_its_command() -> None:
    assert commands().keys() == PROGRAMS.keys()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_accepts_its_command_and_no_flag_is_left_out(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in DIRECTORIES:
        (tmp_path / name).mkdir(parents=True)
    for name in FILES:
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    arguments, settings = commands()[program], PROGRAMS[program]
    parsed = parse_settings(settings, "documented", arguments, {})
    given = {flag for flag in arguments if flag.startswith("--")}
    for field in dataclasses.fields(settings):
        flag = flag_name(field.name)
        assert given & {flag, flag.replace("--", "--no-", 1)}, f"{flag} has no example"
        assert getattr(parsed, field.name) != field.default, f"{flag} is its default"
    assert len(given) == len(dataclasses.fields(settings))


def test_every_command_of_a_client_has_its_examples() -> None:
    assert client_commands().keys() == COMMANDS.keys() - {"up"}


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"up"}))
def test_a_command_accepts_its_examples_and_no_flag_is_left_out(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    helps: list[str] = []

    def stop_after(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(parser: CommandParser, *arguments: Any) -> Any:
            read(parser, *arguments)
            helps.append(parser.format_usage())
            raise Parsed

        return reads

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(CommandParser, name, stop_after(getattr(CommandParser, name)))
    given: set[str] = set()
    for arguments in client_commands()[command]:
        with pytest.raises(Parsed):
            main([command, *arguments])
        given.update(flag for flag in arguments if flag.startswith("--"))
    known = {flag for text in helps for flag in re.findall(r"(?<![\w-])--[a-z-]+", text)}
    positive = {flag.replace("--no-", "--", 1) for flag in given}
    assert {flag.replace("--no-", "--", 1) for flag in known} == positive
