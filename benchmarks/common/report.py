"""Tables in Markdown, for the README to quote as they are."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.common.hops import HOPS
from benchmarks.serving.comparison import Row
from benchmarks.step.rounds import StepRow

HOPS_NOTE = (
    "A step is planned and sent while the one ahead computes: as long as it has to wait in the "
    "worker, the hops around computing cost processor time and no latency."
)
OVERHEAD_NOTE = (
    "From the end of a step in the worker to the end of the next; medians over rounds. Processor "
    "time is per step."
)
HIDDEN_NOTE = (
    "Alone: the same wait in a bare loop, in the same thread, just before. Throughput is that of "
    "whole rounds, their median and the best of them."
)
_BUSY_LOAD = 0.5


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        "torch": version("torch"),
        "grpcio": version("grpcio"),
        "load_average": f"{os.getloadavg()[0]:.2f}",
    }


def machine_text(found: Mapping[str, str], command: str) -> str:
    """The command and the machine; a warning where others were at work on it."""
    text = (
        f"`{command}` on {found['processor']}, {found['cores']} cores; "
        f"Python {found['python']}, torch {found['torch']}, grpcio {found['grpcio']}."
    )
    if float(found["load_average"]) > _BUSY_LOAD:
        text += (
            f"\n\n**Not to be quoted: the machine was busy with other work when this began "
            f"(load average {found['load_average']}).**"
        )
    return text


def serving_table(rows: Sequence[Row], reference: str = "one process") -> str:
    """Latencies and throughput of each side at each concurrency, beside a reference's."""
    return table_text(
        (
            "at once",
            "through",
            "TTFT ms, median / p99",
            "ITL ms, median / p99",
            "end to end ms",
            "tokens/s",
            f"tokens/s to {reference}",
        ),
        (
            (
                str(row.concurrency),
                row.side,
                f"{row.figures.ttft_median:.0f} / {row.figures.ttft_p99:.0f}",
                f"{row.figures.itl_median:.1f} / {row.figures.itl_p99:.1f}",
                f"{row.figures.e2e_median:.0f}",
                f"{row.figures.tokens_per_second:.0f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ),
    )


def rounds_text(rows: Sequence[Row]) -> str:
    """How often each concurrency was measured."""
    counts = {row.concurrency: row.num_rounds for row in rows}
    listed = ", ".join(f"{rounds} at {level}" for level, rounds in counts.items())
    return f"Medians of rounds in turns: {listed}."


def processor_table(rows: Sequence[Row]) -> str:
    """Processor time per output token of each process."""
    processes = list(dict.fromkeys(name for row in rows for name in row.processor_micros))
    return table_text(
        ("at once", "through", *processes),
        (
            (
                str(row.concurrency),
                row.side,
                *(number_text(row.processor_micros.get(name), 0) for name in processes),
            )
            for row in rows
        ),
    )


def hops_table(hops: Mapping[int, Mapping[str, float | None]]) -> str:
    """Median microseconds of each hop that was seen, a column for each concurrency."""
    header = [f"{level} request{'s' if level > 1 else ''}" for level in hops]
    seen = [hop for hop in HOPS if any(found[hop] is not None for found in hops.values())]
    return table_text(
        ("hop of a decode step, median µs", *header),
        ((hop, *(number_text(found[hop], 0) for found in hops.values())) for hop in seen),
    )


def tracing_table(rows: Sequence[Row]) -> str:
    """What tracing costs those who are served."""
    return table_text(
        ("at once", "tracing", "ITL ms, median", "tokens/s", "tokens/s to off"),
        (
            (
                str(row.concurrency),
                row.side,
                f"{row.figures.itl_median:.2f}",
                f"{row.figures.tokens_per_second:.0f}",
                f"{row.ratio:.2f}",
            )
            for row in rows
        ),
    )


def span_work_table(work: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Processor time of the spans of a step, by service."""
    levels = list(dict.fromkeys(level for found in work.values() for level in found))
    services = list(dict.fromkeys(name for found in work.values() for name in found[levels[0]]))
    return table_text(
        ("processor µs per step", *(f"{name}, {level}" for name in services for level in levels)),
        (
            (label, *(f"{found[level][name]:.1f}" for name in services for level in levels))
            for label, found in work.items()
        ),
    )


def overhead_table(rows: Sequence[StepRow]) -> str:
    """An empty step: the time from one to the next, and what each process spends on it."""
    processes = list(rows[0].processor_micros)
    spent = (f"{name}, processor µs" for name in processes)
    return table_text(
        ("running", "scheduling", "step µs, median", "best round", "mean", *spent),
        (
            (
                str(row.running),
                row.mode,
                f"{row.median_micros:.0f}",
                f"{row.best_median_micros:.0f}",
                f"{row.mean_micros:.0f}",
                *(f"{row.processor_micros[name]:.0f}" for name in processes),
            )
            for row in rows
        ),
    )


def hidden_table(rows: Sequence[StepRow]) -> str:
    """A step that takes time: what is left of the throughput that the worker has alone."""
    processes = list(rows[0].processor_micros)
    spent = (f"{name}, processor µs" for name in processes)
    return table_text(
        ("running", "scheduling", "step µs", "alone µs", "throughput to alone", "best", *spent),
        (
            (
                str(row.running),
                row.mode,
                number_text(row.mean_micros, 0),
                number_text(row.bare_micros, 0),
                number_text(row.ratio, 3),
                number_text(row.best_ratio, 3),
                *(f"{row.processor_micros[name]:.0f}" for name in processes),
            )
            for row in rows
        ),
    )


def table_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number_text(value: float | None, digits: int) -> str:
    """With so many digits after the point; a dash where nothing was measured."""
    return "—" if value is None else f"{value:.{digits}f}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
