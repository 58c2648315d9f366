"""Command-line options that several benchmarks share."""

import argparse
import shutil
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

DEMO = Path("models/demo")


def make_parser(program: str, docstring: str | None) -> argparse.ArgumentParser:
    """The parser of a program. Its description is the first paragraph of the module's docstring."""
    description = " ".join((docstring or "").partition("\n\n")[0].split())
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{program}", description=description)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the option --model, a model directory."""
    parser.add_argument(
        "--model", type=model_directory, default=DEMO, help=f"directory (default: {DEMO})"
    )


def add_sized_model(parser: argparse.ArgumentParser, default: str = "135m") -> None:
    """Adds the option --model, a model directory or the size of a random model."""
    parser.add_argument(
        "--model", default=default, help="model directory, or size of a random model"
    )


def is_model(name: str | Path) -> bool:
    return (Path(name) / "config.json").is_file()


def model_directory(text: str) -> Path:
    if not is_model(text):
        raise argparse.ArgumentTypeError(f"{text} is not a model directory")
    return Path(text)


def checkout(text: str) -> Path:
    """Parses the directory of a checkout of Stepwell. Returns the absolute path."""
    if not (Path(text) / "gen" / "stepwell").is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is not a checkout of Stepwell with generated code in gen/ (run make proto)"
        )
    return Path(text).resolve()


def program(path: str) -> str:
    """Parses the path of a program, such as another interpreter."""
    if shutil.which(path) is None:
        raise argparse.ArgumentTypeError(f"{path} is not an executable program")
    return path


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Parses positive integers, separated by commas. The result is sorted, without duplicates."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments at the first `--`. The arguments after it are for another program."""
    own = list(takewhile(lambda argument: argument != "--", argv))
    return own, list(argv[len(own) + 1 :])
