"""`stepwell status`: the queues and the pool of each replica."""

import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from services.cli.arguments import ClientParser, client_of
from services.cli.client import Client, ServerAway
from services.cli.errors import CommandError
from services.cli.views.fleet_view import ReplicaView, Sample, headline, replica_views


def main(argv: Sequence[str]) -> int:
    parser = ClientParser("status", "Shows the queues and the pool of each replica.")
    parser.add_argument("--watch", action="store_true", help="show it again and again")
    parser.add_argument(
        "--interval-seconds", type=float, default=1.0, metavar="X", help="how often (default: 1)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.interval_seconds > 0:
        raise CommandError("--interval-seconds must be above 0", exit_status=2)
    with client_of(arguments) as client:
        if not arguments.watch:
            _show(_sample(client), None)
        elif sys.stdout.isatty():
            _watch_in_terminal(client, arguments.interval_seconds)
        else:
            _watch(client, arguments.interval_seconds)
    return 0


def _sample(client: Client) -> Sample:
    return Sample(client.get("/status"), time.monotonic())


def _samples(
    client: Client, interval_seconds: float
) -> Iterator[tuple[Sample | None, Sample | ServerAway]]:
    """Yields samples without end, each with the sample before it. If a server that answered before
    does not answer now, the error is yielded instead. An error of the first call is raised.
    """
    before = None
    while True:
        try:
            sample = _sample(client)
        except ServerAway as error:
            if before is None:
                raise
            yield None, error
        else:
            yield before, sample
            before = sample
        time.sleep(interval_seconds)


def _show(sample: Sample, before: Sample | None) -> None:
    if sys.stdout.isatty():
        Console().print(_rendered(sample, before))
    else:
        print(plain_text(sample, before), flush=True)


def _watch(client: Client, interval_seconds: float) -> None:
    is_away = False
    for before, sample in _samples(client, interval_seconds):
        if isinstance(sample, Sample):
            _show(sample, before)
        elif not is_away:  # written once
            print(_away(sample), flush=True)
        is_away = not isinstance(sample, Sample)


def _watch_in_terminal(client: Client, interval_seconds: float) -> None:
    with Live(auto_refresh=False) as live:
        for before, sample in _samples(client, interval_seconds):
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
    serves = view.state in ("idle", "running")
    colour = "red" if view.problem else "green" if serves else "yellow"
    state = f"[{colour}]{escape(view.state)}[/{colour}]"
    return Panel(table, title=f"{escape(view.address)} {state}", title_align="left")
