"""`stepwell top`: the activity of the replicas, updated continuously."""

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from services.cli.arguments import ClientParser, add_interval, client_of, interval_of
from services.cli.client import ServerAway
from services.cli.errors import CommandError
from services.cli.trace import writes_utf8
from services.cli.views.samples import Sample, samples
from services.cli.views.top_view import screen
from services.cli.views.waterfall import in_ascii

_PIPE_WIDTH, _PIPE_HEIGHT = 100, 40

Samples = Iterator[tuple[Sample | None, Sample | ServerAway]]


def main(argv: Sequence[str]) -> int:
    parser = ClientParser("top", "Shows queues, budget, pool, steps and requests as they change.")
    parser.add_argument("--once", action="store_true", help="write one screen as text, and end")
    add_interval(parser)
    parser.add_argument(
        "--width", type=int, metavar="N", help="characters of a line (default: the terminal's)"
    )
    arguments = parser.parse_args(argv)
    interval_seconds = interval_of(arguments)
    if arguments.width is not None and arguments.width < 1:
        raise CommandError("--width must be at least 1", exit_status=2)
    with client_of(arguments) as client:
        taken = samples(client, "/activity", interval_seconds)
        if arguments.once or not sys.stdout.isatty():
            _write(taken, arguments)
        else:
            _watch(taken, arguments)
    return 0


def _write(taken: Samples, arguments: Namespace) -> None:
    size = shutil.get_terminal_size((_PIPE_WIDTH, _PIPE_HEIGHT))
    for before, sample in taken:
        if isinstance(sample, ServerAway):
            raise sample
        if before is not None:
            _print(screen(sample, before, arguments.width or size.columns, size.lines))
            if arguments.once:
                return


def _print(lines: Sequence[Text]) -> None:
    console = Console(width=max(map(len, lines), default=1) + 1, soft_wrap=True, highlight=False)
    for line in lines if writes_utf8() else map(in_ascii, lines):
        console.print(line)


def _watch(taken: Samples, arguments: Namespace) -> None:
    with Live(auto_refresh=False, screen=True) as live:
        for before, sample in taken:
            if isinstance(sample, ServerAway):
                live.update(Text(f"{sample}; asking again", style="red"), refresh=True)
                continue
            size = shutil.get_terminal_size()
            width = min(arguments.width or size.columns, size.columns)
            live.update(Group(*screen(sample, before, width, size.lines - 1)), refresh=True)
