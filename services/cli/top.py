"""`stepwell top`: the activity of the replicas, updated continuously."""

import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from services.cli.arguments import ClientParser, client_of
from services.cli.client import Client, ServerAway
from services.cli.errors import CommandError
from services.cli.trace import writes_utf8
from services.cli.views.top_view import Look, screen
from services.cli.views.waterfall import in_ascii

_PIPE_WIDTH, _PIPE_HEIGHT = 100, 40


def main(argv: Sequence[str]) -> int:
    parser = ClientParser("top", "Shows queues, budget, pool, steps and requests as they change.")
    parser.add_argument("--once", action="store_true", help="write one screen as text, and end")
    parser.add_argument(
        "--interval-seconds", type=float, default=1.0, metavar="X", help="how often (default: 1)"
    )
    parser.add_argument(
        "--width", type=int, metavar="N", help="characters of a line (default: the terminal's)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.interval_seconds > 0:
        raise CommandError("--interval-seconds must be above 0", exit_status=2)
    if arguments.width is not None and arguments.width < 1:
        raise CommandError("--width must be at least 1", exit_status=2)
    with client_of(arguments) as client:
        if arguments.once or not sys.stdout.isatty():
            _write(client, arguments)
        else:
            _watch(client, arguments)
    return 0


def _look(client: Client) -> Look:
    return Look(client.get("/activity"), time.monotonic())


def _write(client: Client, arguments: Namespace) -> None:
    """Writes screens as plain text. By default one screen, after an interval over which rates are
    measured; otherwise screens without end.
    """
    before, size = _look(client), shutil.get_terminal_size((_PIPE_WIDTH, _PIPE_HEIGHT))
    while True:
        time.sleep(arguments.interval_seconds)
        look = _look(client)
        _print(screen(look, before, arguments.width or size.columns, size.lines))
        if arguments.once:
            return
        before = look


def _print(lines: Sequence[Text]) -> None:
    console = Console(width=max(map(len, lines), default=1) + 1, soft_wrap=True, highlight=False)
    for line in lines if writes_utf8() else map(in_ascii, lines):
        console.print(line)


def _watch(client: Client, arguments: Namespace) -> None:
    before, seen = None, False
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            size = shutil.get_terminal_size()
            width = min(arguments.width or size.columns, size.columns)
            try:
                look = _look(client)
            except ServerAway as error:
                if not seen:
                    raise
                before = None
                live.update(Text(f"{error}; asking again", style="red"), refresh=True)
            else:
                lines = screen(look, before, width, size.lines - 1)
                live.update(Group(*lines), refresh=True)
                before, seen = look, True
            time.sleep(arguments.interval_seconds)
