"""Formats a comparison of simulated runs as tables, plots and JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.plotting import BLUE, GREEN, ORANGE, RED, SKY, drawing, finish
from services.cli.replay.table import aligned
from services.simulation.laboratory.measures import GROUPS, Measure
from services.simulation.laboratory.run import RunResult

_COLOURS = (BLUE, ORANGE, GREEN, RED, SKY)

Runs = Mapping[str, RunResult]
"""Maps the names of a comparison's runs to the results, in the order of display."""


def values(run: RunResult, measures: Sequence[Measure]) -> dict[str, float]:
    return {measure.key: measure.of(run) for measure in measures}


def tables(runs: Runs) -> str:
    return "\n\n".join(_table(group, measures, runs) for group, measures in GROUPS.items())


def _table(group: str, measures: Sequence[Measure], runs: Runs) -> str:
    lines = [(group, *(measure.name for measure in measures))]
    for name, run in runs.items():
        lines.append((name, *(measure.show(measure.of(run)) for measure in measures)))
    return aligned(lines)


def document(runs: Runs, settings: Mapping[str, Any]) -> str:
    """The settings and all measures as JSON. Equal runs have equal texts."""
    rows = [
        {
            "name": name,
            "num_jobs": len(run.accounts.job_seconds),
            "num_requests": len(run.accounts.wait_seconds),
            "num_steps": run.num_steps,
            "num_computed_tokens": run.num_computed_tokens,
            "simulated_seconds": run.simulated_seconds,
            **{
                group.replace(" ", "_"): values(run, measures) for group, measures in GROUPS.items()
            },
        }
        for name, run in runs.items()
    ]
    return json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n"


def draw(runs: Runs, title: str, directory: Path) -> list[Path]:
    """Writes one plot for each group of measures into a directory. Returns their paths."""
    paths = []
    for group, measures in GROUPS.items():
        path = directory / f"{group.replace(' ', '_')}.png"
        _draw(group, measures, runs, title, path)
        paths.append(path)
    return paths


def _draw(group: str, measures: Sequence[Measure], runs: Runs, title: str, path: Path) -> None:
    names = list(runs)
    with drawing(path, f"{group[0].upper()}{group[1:]}", title) as figure:
        panels = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
        for axes, measure in zip(panels, measures, strict=True):
            bars = [(100 if measure.is_percent else 1) * measure.of(run) for run in runs.values()]
            colours = [_COLOURS[index % len(_COLOURS)] for index in range(len(names))]
            drawn = axes.barh(names, bars, height=0.5, color=colours)
            axes.bar_label(drawn, [measure.show(measure.of(run)) for run in runs.values()])
            finish(axes, measure.name, "", len(names) - 0.5)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlim(0, 1.35 * max(bars) or 1)
            axes.grid(visible=False, axis="y")
