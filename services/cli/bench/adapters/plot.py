"""Plots a run: the distributions of TTFT and ITL, and the load and latencies over time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.bench.core.percentiles import Distribution
from services.cli.bench.core.record import RequestRecord
from services.cli.bench.core.summary import Summary
from services.cli.errors import CommandError
from services.cli.plotting import BLUE, GREEN, GREY, ORANGE, RED, SKY, drawing, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 60
_MAX_COLUMNS = 120


def draw(records: Sequence[RequestRecord], summary: Summary, title: str, path: Path) -> None:
    """Writes the plot in the format of the file's suffix. The timeline also shows the warm-up.
    Raises CommandError if no request succeeded, or if the plot cannot be drawn or written.
    """
    done = [record for record in records if record.is_ok]
    measured = [record for record in done if not record.is_warmup]
    if not measured:
        raise CommandError("no request completed, so there is nothing to draw")
    with drawing(path, title, _in_short(summary)) as figure:
        grid = figure.add_gridspec(3, 2, height_ratios=(3, 2, 2))
        itls = [gap for record in measured for gap in record.itls]
        ttfts = [record.ttft for record in measured if record.ttft is not None]
        first, second = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        _draw_distribution(first, "TTFT", ttfts, summary.ttft_ms)
        _draw_distribution(second, "ITL", itls, summary.itl_ms)
        timeline = figure.add_subplot(grid[1, :])
        _draw_load(timeline, done)
        _draw_requests(figure.add_subplot(grid[2, :], sharex=timeline), records)


def _draw_distribution(
    axes: "Axes", title: str, seconds: Sequence[float], values: Distribution | None
) -> None:
    millis = [value * 1000 for value in seconds]
    if values is None:
        axes.set_title(f"{title}: none was measured")
        return
    # The few values above three times p99 would make the other values unreadable.
    high = min(values.max, 3 * values.percentiles[99]) or 1.0
    counts, _, _ = axes.hist(millis, bins=_BINS, range=(0, high), color=SKY)
    for percent, colour in ((50, BLUE), (95, ORANGE), (99, RED)):
        value = values.percentiles[percent]
        axes.axvline(value, color=colour, linewidth=1.4, label=f"p{percent} {value:,.1f} ms")
    axes.set_xlabel("ms")
    finish(axes, title, "count", 1.08 * max(map(float, counts), default=1.0))


def _draw_load(axes: "Axes", done: Sequence[RequestRecord]) -> None:
    end = max(record.ended or 0.0 for record in done)
    width = max(end / _MAX_COLUMNS, 0.05)
    num_columns = max(1, math.ceil(end / width))
    tokens, running = [0.0] * num_columns, [0.0] * num_columns
    for record in done:
        share = record.output_tokens / max(len(record.token_times), 1) / width
        for time in record.token_times or (record.ended or 0.0,):
            tokens[min(int(time / width), num_columns - 1)] += share
        _add_overlap(running, width, record.sent or record.intended, record.ended or 0.0)
    edges = [index * width for index in range(num_columns + 1)]
    axes.stairs(tokens, edges, fill=True, color=SKY, label="output tokens/s")
    finish(axes, "Load", "output tokens/s", 1.15 * max(*tokens, 1))
    right = axes.twinx()
    right.stairs(running, edges, color=BLUE, linewidth=1.4, baseline=None, label="requests at once")
    right.set_ylim(0, 1.15 * max(*running, 1))
    right.set_ylabel("requests at once", color=BLUE)


def _add_overlap(columns: list[float], width: float, begin: float, end: float) -> None:
    """Adds to each column the fraction of its time between `begin` and `end`."""
    for index in range(int(begin / width), min(int(end / width) + 1, len(columns))):
        overlap = min(end, (index + 1) * width) - max(begin, index * width)
        columns[index] += max(overlap, 0.0) / width


def _draw_requests(axes: "Axes", records: Sequence[RequestRecord]) -> None:
    """Draws each request's TTFT in ms at the time when the request should have been sent. Failures
    are crosses at 0.
    """
    highest = 1.0
    for label, colour, chosen in (
        ("TTFT", GREEN, [r for r in records if r.is_ok and not r.is_warmup]),
        ("warm-up", GREY, [r for r in records if r.is_ok and r.is_warmup]),
    ):
        points = [(r.intended, 1000 * r.ttft) for r in chosen if r.ttft is not None]
        if points:
            times, millis = zip(*points, strict=True)
            axes.scatter(times, millis, s=10, color=colour, label=label)
            highest = max(highest, *millis)
    failed = [record.intended for record in records if record.failure is not None]
    if failed:
        axes.scatter(failed, [0.0] * len(failed), s=18, marker="x", color=RED, label="failed")
    axes.set_xlabel("seconds after the start")
    finish(axes, "Requests", "ms", 1.15 * highest)


def _in_short(summary: Summary) -> str:
    goodput = summary.request_goodput
    return "   ".join(
        [
            f"{summary.completed:,} requests, {summary.failed:,} failed",
            f"{summary.request_throughput:.2f} requests/s",
            f"{summary.output_throughput:,.0f} output tokens/s",
            *(() if goodput is None else (f"goodput {goodput:.2f} requests/s",)),
        ]
    )
