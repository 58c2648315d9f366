"""`python -m benchmarks.soak COMMAND [OPTION]...`: long runs under load, faults and attacks."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from services.common.rpc.grpc_core import silence_grpc

COMMANDS = {
    "day": "a day without requests in virtual time; fails if a context is lost or memory grows",
    "endurance": "full load of mixed requests; fails if anything grows, leaks or breaks",
    "faults": "services are killed, stopped and terminated; fails if an answer fails or changes",
    "hostility": "generated attacks; fails if another client's stream pauses or memory grows",
    "idle": "no requests for minutes; fails if the prefix cache is lost or a warning is logged",
    "openapi": "requests made from the OpenAPI document; fails if an answer is not documented",
    "overload": "more load than the services can take; prints goodput and the time of refusals",
    "schemas": "answers held to JSON schemas through kills; fails if a finished one is not valid",
    "traces": "requests through pauses and kills; fails if a trace does not explain all their time",
}

HELP = "\n".join(
    [
        "usage: python -m benchmarks.soak COMMAND [OPTION]...",
        "",
        *(f"  {name:<11}{summary}" for name, summary in COMMANDS.items()),
        "",
        "`python -m benchmarks.soak COMMAND --help` lists the options of a command.",
    ]
)


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name not in COMMANDS:
        print(
            f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    # Must precede the import of the command's module, because grpc reads the variable when it is
    # imported. Otherwise grpc would report lost connections, which are expected here.
    silence_grpc(os.environ)
    status: int = import_module(f"benchmarks.soak.{name}").main(argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
