"""Sends requests that the OpenAPI document allows or forbids, and checks all answers.

    python -m benchmarks.soak openapi --minutes 5 [--model DIR] [--seed N]

schemathesis generates requests from the gateway's document. It first tests each part of a schema at
its limits and beyond them, and then sends random requests until the time is over. The exit status
is 1 in these cases:

* An answer is a server error.
* The status, the headers, the content type or the schema of an answer are not documented.
* A request that the document forbids is accepted.
* A request with an undocumented method is not refused with the status for a wrong method.

The gateway may refuse a request that the document allows, because the document lacks some rules:
rules for combinations of fields, and limits that depend on the model. Therefore the check
`positive_data_acceptance` is off.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.arguments import add_model, make_parser, positive
from benchmarks.common.stack import Stack
from services.cli.settings import UpSettings

ROOT = Path(__file__).parents[2]
HOOKS = "benchmarks.soak.attack.openapi_hooks"
NOT_COMPARED = "positive_data_acceptance"


def command(url: str, seed: int, *options: str) -> tuple[str, ...]:
    """The command that runs schemathesis against the server at `url`. It must be run with
    `environment()`, and leaves files in its working directory.
    """
    return (
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--seed", str(seed), "--exclude-checks", NOT_COMPARED),
        *("--continue-on-failure", "--no-color", *options),
    )


def environment() -> dict[str, str]:
    """This process's environment, with the hooks for schemathesis."""
    return {**os.environ, "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": str(ROOT)}


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    seconds = max(1, round(60 * arguments.minutes))
    options = ("--max-time", str(seconds), "--workers", "2")
    async with Stack(UpSettings(model=arguments.model)) as stack:
        with tempfile.TemporaryDirectory() as directory:
            process = await asyncio.create_subprocess_exec(
                *command(f"http://{stack.http}", arguments.seed, *options),
                env=environment(),
                cwd=directory,
            )
            status = await process.wait()
        defects = [
            line
            for log in stack.logs().values()
            for line in log.splitlines()
            if "defect" in line or "Traceback" in line
        ]
    for line in defects:
        print(line)
    return 1 if defects else status


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("soak openapi", __doc__)
    parser.add_argument(
        "--minutes", type=positive, default=5.0, help="minutes that the test takes (default: 5)"
    )
    add_model(parser)
    parser.add_argument("--seed", type=int, default=1, help="seed of the requests (default: 1)")
    return parser.parse_args(argv)
