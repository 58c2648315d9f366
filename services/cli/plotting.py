"""The common parts of the commands' plots: colours, and a function that writes a figure."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.errors import CommandError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
RED, GREY, INK = "#D55E00", "#9A9A9A", "#222222"
_STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # keep text as text, not as outlines
}


def require_matplotlib() -> None:
    """Raises CommandError if matplotlib cannot be imported."""
    try:
        import_module("matplotlib")
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'stepwell[plot]'") from None


@contextmanager
def drawing(path: Path, title: str, in_short: str) -> Iterator["Figure"]:
    """Yields an empty figure with a title and, below the title, the line `in_short`. When the
    `with` block ends, writes the figure to `path` in the format of the path's suffix. Raises
    CommandError if that fails.
    """
    require_matplotlib()
    import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(12, 9), dpi=120, layout="constrained")
        # The empty second line leaves space for the line `in_short`.
        style: dict[str, Any] = {"fontsize": 13, "fontweight": "bold", "color": INK}
        figure.suptitle(f"{title}\n", x=0.01, ha="left", **style)
        figure.text(0.0105, 0.952, in_short, fontsize=9.5, color=INK)
        yield figure
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise CommandError(f"cannot write {path}: {why}") from None


def finish(axes: "Axes", title: str, unit: str, top: float) -> None:
    """Sets a panel's title, the unit and upper limit of its vertical axis, and its legend."""
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_ylim(0, top)
    axes.margins(x=0.005)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        options: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 6}
        axes.legend(**options, borderaxespad=0.1, columnspacing=1.4, handlelength=1.2)
