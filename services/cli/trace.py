"""`stepwell trace`: shows where a request's time was spent, from the gateway's traces."""

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from services.cli.amounts import seconds_text
from services.cli.arguments import ClientParser, client_of
from services.cli.errors import CommandError
from services.cli.views.program_view import program_lines
from services.cli.views.waterfall import in_ascii, waterfall

_PIPE_WIDTH = 120
_NOT_KEPT = "the gateway keeps no traces: a collector receives them, or tracing is off"


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.limit < 1 or (arguments.width is not None and arguments.width < 1):
        raise CommandError("--limit and --width must be at least 1", exit_status=2)
    with client_of(arguments) as client:
        if arguments.name is not None:
            trace = client.get(f"/traces/{quote(arguments.name, safe='')}")
            columns = shutil.get_terminal_size((_PIPE_WIDTH, 40)).columns
            lines = waterfall(
                trace, arguments.width or columns, every_attribute=arguments.attributes
            )
        elif arguments.program is not None:
            query = f"program={quote(arguments.program, safe='')}&limit=200"
            turns = client.get(f"/traces?{query}")["traces"]
            if not turns:
                raise CommandError(f"no turn of program {arguments.program} has been traced")
            columns = shutil.get_terminal_size((_PIPE_WIDTH, 40)).columns
            drawn = program_lines(arguments.program, turns, arguments.width or columns)
            lines = list(map(Text, drawn))
        else:
            listed = client.get(f"/traces?order={arguments.order}&limit={arguments.limit}")
            if not listed["are_kept"] and not listed["traces"]:
                raise CommandError(_NOT_KEPT)
            lines = list(map(Text, listing(listed["traces"], arguments.order, time.time())))
    console = Console(width=max(map(len, lines), default=1) + 1, soft_wrap=True, highlight=False)
    for line in lines if writes_utf8() else map(in_ascii, lines):
        console.print(line)
    return 0


def listing(traces: Sequence[dict[str, Any]], order: str, now: float) -> list[str]:
    """A table of requests. `now` is in Unix seconds. A running request's output tokens are not
    shown, because without streaming the gateway receives them late.
    """
    if not traces:
        which = "that failed " if order == "failed" else ""
        return [f"no request {which}has been traced; a few of each minute are, unless told more"]
    rows = [("AGE", "TOOK", "FIRST", "TOKENS", "REQUEST", "STATUS")]
    for trace in traces:
        attributes = trace["attributes"]
        first = attributes.get("gen_ai.response.time_to_first_chunk")
        tokens = [
            attributes.get(f"gen_ai.usage.{kind}_tokens", "-") for kind in ("input", "output")
        ]
        if trace["is_running"]:
            tokens[1] = "…"
        rows.append(
            (
                seconds_text(max(0.0, now - trace["started_unix_seconds"])),
                seconds_text(trace["seconds"]),
                "-" if first is None else seconds_text(first),
                f"{tokens[0]} + {tokens[1]}",
                trace["request_id"] or trace["trace_id"],
                _status(trace),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if index < 4 else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _status(trace: dict[str, Any]) -> str:
    if trace["is_running"]:
        return "running"
    client_error: str = trace["attributes"].get("stepwell.client_error", "")
    return trace["error"] or client_error or "ok"


def _parser() -> ClientParser:
    parser = ClientParser(
        "trace", "Shows where the time of a request went, or lists requests that were traced."
    )
    parser.add_argument(
        "name", nargs="?", metavar="ID", help="id of a request, or of its trace (default: a list)"
    )
    parser.add_argument(
        "--program", metavar="ID", help="draw the turns and pauses of a program, see docs/agents.md"
    )
    order = parser.add_mutually_exclusive_group()
    for name in ("slowest", "failed"):
        order.add_argument(
            f"--{name}",
            dest="order",
            action="store_const",
            const=name,
            default="newest",
            help=f"list the {'slowest first' if name == 'slowest' else 'failed ones only'}",
        )
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="most requests to list (default: 20)"
    )
    parser.add_argument(
        "--attributes", action="store_true", help="show every attribute, with its whole name"
    )
    parser.add_argument(
        "--width", type=int, metavar="N", help="characters of a line (default: the terminal's)"
    )
    return parser


def writes_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
