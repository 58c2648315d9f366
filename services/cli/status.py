"""`stepwell status`: the queues and the pool of each replica."""

import sys
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from services.cli.arguments import ClientParser, add_interval, client_of, interval_of
from services.cli.client import Client, ServerAway
from services.cli.views.fleet_view import ReplicaView, headline, replica_views
from services.cli.views.samples import Sample, samples

_PATH = "/status"


def main(argv: Sequence[str]) -> int:
    parser = ClientParser("status", "Shows the queues and the pool of each replica.")
    parser.add_argument(
        "--watch", action="store_true", help="show the replicas repeatedly, until interrupted"
    )
    add_interval(parser)
    arguments = parser.parse_args(argv)
    interval_seconds = interval_of(arguments)
    with client_of(arguments) as client:
        if not arguments.watch:
            _show(Sample.take(client, _PATH), None)
        elif sys.stdout.isatty():
            _watch_in_terminal(client, interval_seconds)
        else:
            _watch(client, interval_seconds)
    return 0


def _show(sample: Sample, before: Sample | None) -> None:
    if sys.stdout.isatty():
        Console().print(_rendered(sample, before))
    else:
        print(plain_text(sample, before), flush=True)


def _watch(client: Client, interval_seconds: float) -> None:
    is_away = False
    for before, sample in samples(client, _PATH, interval_seconds):
        if isinstance(sample, Sample):
            _show(sample, before)
        elif not is_away:  # the error is written once
            print(_away(sample), flush=True)
        is_away = not isinstance(sample, Sample)


def _watch_in_terminal(client: Client, interval_seconds: float) -> None:
    with Live(auto_refresh=False) as live:
        for before, sample in samples(client, _PATH, interval_seconds):
            shown: RenderableType = (
                _rendered(sample, before)
                if isinstance(sample, Sample)
                else f"[red]{escape(_away(sample))}[/red]"
            )
            live.update(shown, refresh=True)


def _away(error: ServerAway) -> str:
    return f"{error}; asking again"


def plain_text(sample: Sample, before: Sample | None) -> str:
    lines = [headline(sample)]
    for view in replica_views(sample, before):
        lines.append(f"replica {view.address}: {view.state}")
        lines += [f"  {label:<12} {value}" for label, value in view.rows]
    return "\n".join(lines)


def _rendered(sample: Sample, before: Sample | None) -> RenderableType:
    return Group(
        f"[bold]{escape(headline(sample))}[/bold]",
        *(_panel(view) for view in replica_views(sample, before)),
    )


def _panel(view: ReplicaView) -> Panel:
    table = Table.grid(padding=(0, 2))
    for label, value in view.rows:
        table.add_row(f"[dim]{label}[/dim]", escape(value))
    state = f"[{view.colour}]{escape(view.state)}[/{view.colour}]"
    return Panel(table, title=f"{escape(view.address)} {state}", title_align="left")
