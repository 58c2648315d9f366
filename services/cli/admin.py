"""`stepwell admin`: calls the gateway's operator API, which applies each call to its replicas."""

import os
from collections.abc import Sequence
from typing import Any

from services.cli.arguments import key
from services.cli.client import Client
from services.cli.errors import CommandError, CommandParser
from services.cli.processes.tls_files import TlsFiles

DEFAULT_URL = "http://127.0.0.1:8001"
CALLS = ("pause", "resume", "reset-prefix-cache", "drain", "undrain")
_NAME_REPLICAS = ("drain", "undrain")
_MODES = ("abort", "wait", "keep")


def main(argv: Sequence[str]) -> int:
    arguments = vars(_parser().parse_args(argv))
    url, admin_key, call = (arguments.pop(name) for name in ("url", "admin_key", "call"))
    if call in _NAME_REPLICAS and not arguments["replica"]:
        raise CommandError(
            f"{call} needs --replica ADDRESS, as `stepwell status` names it", exit_status=2
        )
    tls = TlsFiles.taken_from(arguments)
    query = {name: value for name, value in arguments.items() if value not in (None, False)}
    with Client(url, admin_key, tls, served_by="stepwell up --admin-port 8001") as client:
        answer = client.post(f"/{call.replace('-', '_')}", query)
    for replica in answer["replicas"]:
        print(f"{replica['address']}: {_status_text(replica, answer['status'])}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        "admin",
        description="Pauses, resumes, resets and drains the replicas of a gateway.",
        epilog="STEPWELL_ADMIN_URL and STEPWELL_ADMIN_KEY are defaults of --url and --admin-key.",
    )
    parser.add_argument("call", choices=CALLS, metavar="CALL", help=", ".join(CALLS))
    parser.add_argument(
        "--url",
        default=os.environ.get("STEPWELL_ADMIN_URL", DEFAULT_URL),
        help=f"the gateway's --admin-address, as a URL or unix:PATH (default: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--admin-key",
        type=key,
        default=os.environ.get("STEPWELL_ADMIN_KEY"),
        help="key of the gateway's --admin-address",
    )
    TlsFiles.add_flags(parser)
    parser.add_argument(
        "--replica",
        action="append",
        metavar="ADDRESS",
        help="a replica, as `stepwell status` names it; may be given several times (default: all, "
        "except of drain and undrain)",
    )
    parser.add_argument(
        "--mode", choices=_MODES, help="how a pause treats requests (default: abort)"
    )
    parser.add_argument(
        "--reset-running-requests",
        action="store_true",
        help="preempt running requests, whose blocks would otherwise prevent the reset",
    )
    return parser


def _status_text(replica: dict[str, Any], status: str) -> str:
    left = replica.get("num_unfinished")
    return status if left is None else f"{status}, {left} requests left"
