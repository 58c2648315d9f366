"""The `stepwell` command: runs a subcommand and reports an error in one sentence."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from services.cli.errors import CommandError
from services.common.process.standard_streams import complain, drop_unwritten
from services.common.rpc.grpc_core import silence_grpc

COMMANDS = {
    "up": "start all four services and serve a model",
    "chat": "talk with a model, in the terminal or through a pipe",
    "complete": "continue a text",
    "keys": "make, list and revoke API keys",
    "status": "show the queues and the pool of each replica",
    "top": "show what the replicas do, as it changes",
    "trace": "show where the time of a request went",
    "admin": "pause, resume, reset and drain replicas",
    "bench": "send a load to an OpenAI server and measure it",
    "deploy": "bring a compose file up, break its containers, and watch them heal",
    "replay": "drive the scheduler again from a step log",
    "simulate": "compare policies on simulated fleets",
    "profile": "measure a worker's steps, for the simulated device",
    "explore": "search for faults, in virtual time",
    "doctor": "show what this machine has, and how much of it is used",
}

_INTERRUPTED = 130

HELP = "\n".join(
    [
        "usage: stepwell COMMAND [OPTION]...",
        "",
        "Large language models served from four small services.",
        "",
        *(f"  {name:<10}{summary}" for name, summary in COMMANDS.items()),
        "",
        "`stepwell COMMAND --help` lists the options of a command.",
        "`stepwell --version` says which version this is.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status, even if an error cannot be written."""
    try:
        return _main(argv)
    finally:
        drop_unwritten(sys.stderr)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if name == "--version":
        from importlib.metadata import version  # noqa: PLC0415 - takes longer than all other imports

        print(f"stepwell {version('stepwell')}")
        return 0
    if name not in COMMANDS:
        complain(f"stepwell: there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
        return 2
    return _run(name, arguments[1:])


def _run(name: str, arguments: Sequence[str]) -> int:
    try:
        # Invalid bytes must raise an error where they are read. In some locales Python decodes them
        # without an error, and fails only when it writes the text.
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="strict")
        # grpc reads its variables at import. By default it would log each connection that
        # `stepwell up` loses when it restarts a service.
        silence_grpc(os.environ)
        # A subcommand's libraries are loaded only when it runs, so that --help is fast.
        status: int = import_module(f"services.cli.{name}").main(arguments)
    except CommandError as error:
        complain(f"stepwell {name}: {error.sentence}")
        return error.exit_status
    except UnicodeError:
        complain(f"stepwell {name}: the input is not UTF-8 text")
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe. Python must not report this when it flushes `sys.stdout`.
        sys.stdout = None
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
