"""The error that ends a command, with one sentence for people and an exit status."""

from pathlib import Path
from typing import Any, NoReturn

from services.common.process.argument_parser import ArgumentParser


class CommandError(Exception):
    """Ends a command. Standard error shows `stepwell <command>: <sentence>`."""

    def __init__(self, sentence: str, *, exit_status: int = 1) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.exit_status = exit_status


def require_directory(path: Path | None) -> None:
    """Raises CommandError if a file cannot be written because its directory does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise CommandError(f"cannot write {path}: its directory does not exist", exit_status=2)


class CommandParser(ArgumentParser):
    """An argument parser that raises CommandError."""

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(prog=f"stepwell {command}", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise CommandError(message, exit_status=2)
