"""The common flags of the commands that are clients of a gateway."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from services.cli import DEFAULT_URL
from services.cli.client import Client
from services.cli.errors import CommandError, CommandParser
from services.cli.processes.tls_files import TlsFiles

_SECONDS_PER_DAY = 86_400
_HIGH_TEMPERATURE = 2.0
"""The highest temperature that OpenAI's API accepts."""


def key(text: str) -> str:
    """An API key without the line break that files and secrets often have at their end."""
    if not ((text := text.strip()).isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("must be printable ASCII characters in one line")
    return text


def _number(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise argparse.ArgumentTypeError(f"must be a number, not {text!r}")


_SAMPLING: tuple[tuple[str, Callable[[str], float], str], ...] = (
    ("max_tokens", int, "maximum number of tokens to generate"),
    (
        "temperature",
        _number,
        "temperature of sampling: 0 is greedy, 1 the model's own distribution",
    ),
    ("top_p", _number, "sample from the most probable tokens with this total probability"),
    ("top_k", int, "keep the k most probable tokens"),
    (
        "min_p",
        _number,
        "drop tokens whose probability is below this fraction of the highest probability",
    ),
    ("presence_penalty", _number, "penalty for tokens that the answer already has"),
    (
        "frequency_penalty",
        _number,
        "penalty for tokens, times the number of their occurrences in the answer",
    ),
    (
        "repetition_penalty",
        _number,
        "penalty for tokens that the prompt or the answer already has; 1: none",
    ),
    ("seed", int, "the same seed gives the same answer"),
)


class ClientParser(CommandParser):
    """A parser with the flags for the server's URL, the API key and certificates."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            command,
            description=description,
            epilog="STEPWELL_URL and STEPWELL_API_KEY are the defaults of --url and --api-key.",
        )
        self.add_argument(
            "--url",
            default=os.environ.get("STEPWELL_URL", DEFAULT_URL),
            help=f"URL of the server (default: {DEFAULT_URL})",
        )
        self.add_argument(
            "--api-key",
            type=key,
            default=os.environ.get("STEPWELL_API_KEY"),
            help="API key for the server",
        )
        TlsFiles.add_flags(self)


def client_of(arguments: argparse.Namespace) -> Client:
    return Client(arguments.url, arguments.api_key, TlsFiles.taken_from(vars(arguments)))


def add_interval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval-seconds",
        type=float,
        default=1.0,
        metavar="X",
        help="seconds between two updates (default: 1)",
    )


def interval_of(arguments: argparse.Namespace) -> float:
    """The value of --interval-seconds. Raises CommandError unless it is in (0, a day]."""
    seconds: float = arguments.interval_seconds
    if not 0 < seconds <= _SECONDS_PER_DAY:
        raise CommandError("--interval-seconds must be above 0, and a day at most", exit_status=2)
    return seconds


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds flags for the model and sampling. They have no defaults: the server's defaults apply."""
    parser.add_argument(
        "--model", help="name of the model (default: the first model of the server)"
    )
    for name, kind, text in _SAMPLING:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help=text, metavar="N" if kind is int else "X"
        )
    parser.add_argument(
        "--stop",
        action="append",
        help="end the answer before this text; may be given several times",
    )


def sampling_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """The request fields for the sampling flags that were set."""
    names = (*(name for name, _, _ in _SAMPLING), "stop")
    given = {name: getattr(arguments, name) for name in names}
    temperature = arguments.temperature
    if temperature is not None and temperature > _HIGH_TEMPERATURE:
        print(
            f"a temperature of {temperature:g} makes answers almost random; from 0 to 1 is usual",
            file=sys.stderr,
        )
    return {name: value for name, value in given.items() if value is not None}
