"""A run as a picture: use of the budget and the pool, waiting requests, preemptions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.errors import CommandError
from services.cli.replay.statistics import RunStatistics, StepSample
from services.cli.replay.table import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_COLUMNS = 600

# Okabe and Ito's palette, made for colour-blind readers too.
_BLUE, _SKY, _ORANGE, _GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
_RED, _GREY, _INK = "#D55E00", "#9A9A9A", "#222222"
_STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


class Columns:
    """Samples of a run, in at most MAX_COLUMNS columns, several steps in one where there are more.

    `edges` are the first step of each column, and the end of the last.
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
    """Writes the picture, in the format of the file's suffix.

    Raises CommandError if it cannot be drawn or written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to load
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'stepwell[plot]'") from None
    if not run.samples:
        raise CommandError("there is no step to draw")
    columns = Columns(run.samples)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(12, 9), dpi=120, layout="constrained")
        panels = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
        # The empty second line makes room for the numbers.
        style: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "color": _INK}
        figure.suptitle(f"{title}\n", x=0.01, ha="left", **style)
        figure.text(0.0105, 0.952, _in_short(run), fontsize=9.5, color=_INK)
        _draw_budget(panels[0], run, columns)
        _draw_pool(panels[1], run, columns)
        _draw_queues(panels[2], run, columns)
        per_column = columns.steps_per_column
        panels[2].set_xlabel(
            "step" if per_column == 1 else f"step (each column is the mean of {per_column})"
        )
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise CommandError(f"cannot write {path}: {why}") from None


def _draw_budget(axes: "Axes", run: RunStatistics, columns: Columns) -> None:
    layers = {
        "decode": ("num_decode_tokens", _BLUE),
        "drafts": ("num_draft_tokens", _GREEN),
        "prefill": ("num_prefill_tokens", _SKY),
        "recomputed": ("num_recomputed_tokens", _ORANGE),
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
    axes.axhline(budget, color=_INK, linestyle="--", linewidth=1, label=f"budget {budget:,}")
    _finish(axes, "Tokens of each step", "tokens", 1.08 * max(budget, *base))


def _draw_pool(axes: "Axes", run: RunStatistics, columns: Columns) -> None:
    usable = run.config.num_blocks - 1
    used = [100 * value / usable for value in columns.mean("num_used_blocks")]
    axes.stairs(used, columns.edges, fill=True, color=_SKY, label="blocks held by requests")
    axes.stairs(used, columns.edges, color=_BLUE, linewidth=1)
    gave_way = columns.total("num_preemptions")
    where = [index for index, count in enumerate(gave_way) if count]
    if where:
        middles = [(columns.edges[index] + columns.edges[index + 1]) / 2 for index in where]
        axes.vlines(middles, 0, 100, color=_RED, linewidth=0.6, alpha=0.35)
        sizes = [18 + 12 * gave_way[index] for index in where]
        axes.scatter(
            middles,
            [104] * len(where),
            s=sizes,
            marker="v",
            color=_RED,
            label=f"preemptions {sum(gave_way):,}",
            zorder=3,
        )
    title = f"Pool of {usable:,} blocks of {run.config.block_size} tokens"
    _finish(axes, title, "% in use", 112)
    axes.set_yticks([0, 25, 50, 75, 100])


def _draw_queues(axes: "Axes", run: RunStatistics, columns: Columns) -> None:
    waiting, running = columns.mean("num_waiting"), columns.mean("num_running")
    axes.stairs(waiting, columns.edges, fill=True, color=_ORANGE, label="waiting")
    axes.stairs(running, columns.edges, color=_BLUE, linewidth=1.6, label="running", baseline=None)
    limit = run.config.max_running
    highest = max(*waiting, *running, 1)
    if limit <= 2 * highest:
        axes.axhline(limit, color=_INK, linestyle="--", linewidth=1, label=f"may run {limit:,}")
        highest = max(highest, limit)
    _finish(axes, "Requests", "requests", 1.08 * highest)
    axes.yaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]


def _in_short(run: RunStatistics) -> str:
    """The most important numbers of the run."""
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


def _finish(axes: "Axes", title: str, unit: str, top: float) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_ylim(0, top)
    axes.margins(x=0.005)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    options: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 6}
    axes.legend(**options, borderaxespad=0.1, columnspacing=1.4, handlelength=1.2)
