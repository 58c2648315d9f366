"""Plots a run: the use of token budget and block pool, waiting requests, and preemptions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.errors import CommandError
from services.cli.plotting import BLUE, GREEN, INK, ORANGE, RED, SKY, drawing, finish
from services.cli.replay.statistics import RunStatistics, StepSample
from services.cli.replay.table import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 600


class Columns:
    """A run's steps in at most MAX_COLUMNS columns. Each column combines up to `steps_per_column`
    consecutive steps. `edges` has the first step of each column, and the end of the last column.
    """

    def __init__(self, samples: Sequence[StepSample]) -> None:
        self.steps_per_column = size = max(1, -(-len(samples) // MAX_COLUMNS))
        starts = range(0, len(samples), size)
        self.edges = [*starts, max(1, len(samples))]
        self.groups = [samples[start : start + size] for start in starts]

    def mean(self, name: str) -> list[float]:
        return [
            sum(getattr(sample, name) for sample in group) / len(group) for group in self.groups
        ]

    def total(self, name: str) -> list[int]:
        return [sum(getattr(sample, name) for sample in group) for group in self.groups]


def draw(run: RunStatistics, title: str, path: Path) -> None:
    """Writes the plot in the format of the file's suffix. Raises CommandError if that fails."""
    if not run.samples:
        raise CommandError("there is no step to draw")
    columns = Columns(run.samples)
    with drawing(path, title, _in_short(run)) as figure:
        panels = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
        _draw_budget(panels[0], run, columns)
        _draw_pool(panels[1], run, columns)
        _draw_queues(panels[2], run, columns)
        per_column = columns.steps_per_column
        panels[2].set_xlabel(
            "step" if per_column == 1 else f"step (each column is the mean of {per_column})"
        )


def _draw_budget(axes: "Axes", run: RunStatistics, columns: Columns) -> None:
    layers = {
        "decode": ("num_decode_tokens", BLUE),
        "drafts": ("num_draft_tokens", GREEN),
        "prefill": ("num_prefill_tokens", SKY),
        "recomputed": ("num_recomputed_tokens", ORANGE),
    }
    base = [0.0] * len(columns.groups)
    for kind, (name, colour) in layers.items():
        total = sum(columns.total(name))
        if total:
            top = [low + value for low, value in zip(base, columns.mean(name), strict=True)]
            label = f"{kind} {total:,}"
            axes.stairs(top, columns.edges, baseline=base, fill=True, color=colour, label=label)
            base = top
    budget = run.config.token_budget
    axes.axhline(budget, color=INK, linestyle="--", linewidth=1, label=f"budget {budget:,}")
    finish(axes, "Tokens of each step", "tokens", 1.08 * max(budget, *base))


def _draw_pool(axes: "Axes", run: RunStatistics, columns: Columns) -> None:
    usable = run.config.num_blocks - 1
    used = [100 * value / usable for value in columns.mean("num_used_blocks")]
    axes.stairs(used, columns.edges, fill=True, color=SKY, label="blocks held by requests")
    axes.stairs(used, columns.edges, color=BLUE, linewidth=1)
    gave_way = columns.total("num_preemptions")
    where = [index for index, count in enumerate(gave_way) if count]
    if where:
        middles = [(columns.edges[index] + columns.edges[index + 1]) / 2 for index in where]
        axes.vlines(middles, 0, 100, color=RED, linewidth=0.6, alpha=0.35)
        sizes = [18 + 12 * gave_way[index] for index in where]
        axes.scatter(
            middles,
            [104] * len(where),
            s=sizes,
            marker="v",
            color=RED,
            label=f"preemptions {sum(gave_way):,}",
            zorder=3,
        )
    title = f"Pool of {usable:,} blocks of {run.config.block_size} tokens"
    finish(axes, title, "% in use", 112)
    axes.set_yticks([0, 25, 50, 75, 100])


def _draw_queues(axes: "Axes", run: RunStatistics, columns: Columns) -> None:
    waiting, running = columns.mean("num_waiting"), columns.mean("num_running")
    axes.stairs(waiting, columns.edges, fill=True, color=ORANGE, label="waiting")
    axes.stairs(running, columns.edges, color=BLUE, linewidth=1.6, label="running", baseline=None)
    limit = run.config.max_running
    highest = max(*waiting, *running, 1)
    if limit <= 2 * highest:
        axes.axhline(limit, color=INK, linestyle="--", linewidth=1, label=f"may run {limit:,}")
        highest = max(highest, limit)
    finish(axes, "Requests", "requests", 1.08 * highest)
    axes.yaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]


def _in_short(run: RunStatistics) -> str:
    wanted = ("requests", "steps", "tokens generated", "preemptions", "recomputed tokens")
    shown = figures(run)
    counts = [f"{shown[name]} {name}" for name in wanted]
    return "   ".join(
        [
            *counts,
            f"queueing p99 {shown['queueing, steps, p99']} steps",
            f"first token p99 {shown['time to first token, steps, p99']} steps",
            f"prefix hits {shown['prefix hit rate']}",
        ]
    )
